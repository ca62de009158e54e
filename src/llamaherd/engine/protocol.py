"""The narrow interface that the scheduler, the shards and the fake engine share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..config import SamplingConfig
from ..errors import LlamaherdError
from ..types import Prompt

__all__ = [
    "Batch",
    "Draw",
    "Engine",
    "FloatArray",
    "IntArray",
    "Pick",
    "PipelinedEngine",
    "Row",
    "SequenceMemory",
    "TextVocabulary",
    "TokenSampler",
]

FloatArray: TypeAlias = NDArray[np.float32]
IntArray: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Draw:
    """How one token is drawn.

    Attributes:
        sampling: with which settings.
        number: the uniform number in [0, 1) that decides.
        top: how many of the most probable tokens are wanted beside it.
        without: tokens that may not be drawn, unless nothing else fits a grammar.
    """

    sampling: SamplingConfig
    number: float
    top: int = 0
    without: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Pick:
    """A token that was drawn.

    Attributes:
        token, logprob: its natural log-probability is of the unmodified distribution.
        top: (token, logprob) of the most probable, as many as were wanted.
        complete: the grammar's text is complete, and the token its end.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    complete: bool = False


@dataclass(frozen=True, eq=False)
class Batch:
    """Tokens of one or many sequences for one decode.

    Either ``tokens`` or ``embeddings`` is given. The positions of a sequence's tokens continue it.

    Attributes:
        tokens: int32 [n], token ids.
        positions: int32 [n].
        sequences: int32 [n], the sequence that each token belongs to.
        outputs: bool [n], whose logits are wanted.
        embeddings: float32 [n, n_embd], input embeddings or hidden states in place of tokens.
        draws: [n], for an engine that can draw: how the token after each one is drawn, None where its logits
            are wanted, if anything.
    """

    tokens: IntArray | None
    positions: IntArray
    sequences: IntArray
    outputs: NDArray[np.bool_]
    embeddings: FloatArray | None = None
    draws: tuple[Draw | None, ...] | None = None

    def __len__(self) -> int:
        return len(self.positions)


Row: TypeAlias = FloatArray | Pick | LlamaherdError
"""What comes of a wanted token: its logits [n_vocab], what was drawn from them, or why nothing could be."""


class TextVocabulary(Protocol):
    """Text to tokens and back."""

    @property
    def n_tokens(self) -> int:
        """Number of token ids."""

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """A prompt's token ids: BOS once where the model wants one, special tokens only where allowed."""

    def piece(self, token: int) -> bytes:
        """The bytes of one token in running text; control tokens have none."""

    def is_end(self, token: int) -> bool:
        """Whether the token ends a generation."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """All tokens that end a generation."""


class SequenceMemory(Protocol):
    """The KV cache as sequences that can be handed out, forked, trimmed and taken back."""

    @property
    def n_sequences(self) -> int:
        """Most sequences at once."""

    @property
    def n_cells(self) -> int:
        """Tokens that the cache holds in all (unified) or per sequence (split)."""

    @property
    def free_cells(self) -> int:
        """Tokens that still fit, all sequences together."""

    @property
    def free_sequences(self) -> int:
        """Sequence ids that are not handed out."""

    @property
    def unified(self) -> bool:
        """Whether forks share their cells; otherwise they copy them."""

    @property
    def can_trim(self) -> bool:
        """Whether part of a sequence can be removed (recurrent models cannot)."""

    def length(self, sequence: int) -> int:
        """Tokens that the sequence holds; its next position."""

    def own_cells(self, sequence: int) -> int:
        """Cells that only this sequence uses: what releasing it would free."""

    def allocate(self) -> int:
        """An empty sequence's id. Raises OutOfSequencesError."""

    def release(self, sequence: int) -> None:
        """Take a sequence id back and drop its tokens."""

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence that begins as the first ``length`` tokens of another (all, if None)."""

    def trim(self, sequence: int, length: int) -> None:
        """Keep only the first ``length`` tokens."""


class TokenSampler(Protocol):
    """Draws the tokens of one candidate."""

    def sample(self, logits: FloatArray, draw: float) -> int:
        """The next token id from logits [n_vocab], which are not changed, and a uniform number in [0, 1)."""

    def accept(self, token: int) -> None:
        """Note a token of the text: penalties and grammar follow it."""

    def close(self) -> None:
        """Free what llama.cpp holds; idempotent."""


@runtime_checkable
class Engine(Protocol):
    """Decodes batches of many sequences.

    Calls from several threads are serialised by the engine; abort() may come from any thread at any time.
    """

    @property
    def vocabulary(self) -> TextVocabulary:
        """Text to tokens and back."""

    @property
    def memory(self) -> SequenceMemory:
        """The KV cache."""

    @property
    def n_ctx(self) -> int:
        """Most tokens of one sequence."""

    @property
    def n_batch(self) -> int:
        """Most tokens of one decode that are computed without being split."""

    def decode(self, batch: Batch) -> FloatArray:
        """Compute a batch; logits float32 [n wanted, n_vocab] in batch order.

        The array may be the engine's own memory: it is valid until the next decode. On any error the
        sequences are as they were before the call, but where ``can_trim`` is false a NativeError may leave
        them empty.

        Raises:
            TokenError, PositionError, SequenceError, OutOfCellsError: the batch is not valid; nothing ran.
            DecodeAbortedError: abort() was called.
            DecodeError: llama.cpp failed.
        """

    def make_sampler(self, config: SamplingConfig, prompt: Sequence[int] = ()) -> TokenSampler:
        """A sampler for one candidate whose text begins with ``prompt``. Raises GrammarError."""

    def abort(self) -> None:
        """Stop the decode in flight, if there is one, as soon as llama.cpp asks."""

    def close(self) -> None:
        """Free everything; idempotent."""


@runtime_checkable
class PipelinedEngine(Engine, Protocol):
    """An engine that has several batches under way at once, of which each stage computes another."""

    @property
    def depth(self) -> int:
        """Batches that keep every stage at work."""

    def submit(self, batch: Batch) -> Any:
        """Begin a batch; the ticket is for collect(). Sequences grow at once.

        Raises TokenError, PositionError, SequenceError, OutOfCellsError: the batch is not valid.
        """

    def collect(self, ticket: Any) -> FloatArray | list[Row]:
        """What decode() gives or raises, of the oldest batch that was not collected.

        Of a batch with ``draws`` a row for each wanted token, in batch order.
        """

    def can_draw(self, config: SamplingConfig) -> bool:
        """Whether a batch may have tokens drawn with these settings, so that logits need not travel."""
