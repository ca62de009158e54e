"""For tests, yours as well: an Engine without a model, which keeps the rules of the real one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from .config import SamplingConfig
from .engine.protocol import Batch, FloatArray
from .errors import (
    ClosedError,
    DecodeAbortedError,
    GrammarError,
    LlamaherdError,
    NativeError,
    OutOfCellsError,
    OutOfSequencesError,
    PositionError,
    SequenceError,
    TokenError,
)
from .logits import check_finite
from .types import Prompt, PromptPart

__all__ = ["FakeEngine", "FakeMemory", "FakeVocabulary"]


class FakeVocabulary:
    """Bytes as tokens 0-255, then BOS (256) and EOS (257)."""

    bos = 256
    eos = 257
    n_tokens = 258
    end_tokens = frozenset({257})

    def __init__(self, *, add_bos: bool = True) -> None:
        self.add_bos = add_bos

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """BOS and the text's bytes; ids as they are."""
        if isinstance(prompt, str):
            return [self.bos] * self.add_bos + list(prompt.encode())
        if all(isinstance(p, PromptPart) for p in prompt):
            text = "".join(p.text for p in prompt if isinstance(p, PromptPart))
            return [self.bos] * self.add_bos + list(text.encode())
        tokens = [int(t) for t in prompt if not isinstance(t, PromptPart)]
        for i, token in enumerate(tokens):
            if not 0 <= token < self.n_tokens:
                raise TokenError(token, self.n_tokens, i)
        return tokens

    def piece(self, token: int) -> bytes:
        """The byte; nothing for BOS and EOS."""
        return bytes([token]) if token < 256 else b""

    def is_end(self, token: int) -> bool:
        """Whether it is EOS."""
        return token in self.end_tokens


class FakeMemory:
    """Sequences as token lists, cells counted one by one (shared by forks, as in a unified cache)."""

    def __init__(self, n_sequences: int, n_cells: int, *, can_trim: bool = True) -> None:
        self.n_sequences = n_sequences
        self.n_cells = n_cells
        self.can_trim = can_trim
        self.unified = True
        self.tokens: dict[int, list[int]] = {}
        self._cells: dict[int, list[object]] = {}

    @property
    def used_cells(self) -> int:
        """Distinct cells."""
        return len({id(cell) for cells in self._cells.values() for cell in cells})

    @property
    def free_cells(self) -> int:
        """Cells that are left."""
        return self.n_cells - self.used_cells

    @property
    def free_sequences(self) -> int:
        """Ids that are left."""
        return self.n_sequences - len(self.tokens)

    def _check(self, sequence: int) -> None:
        if sequence not in self.tokens:
            raise SequenceError(sequence, "it is not in use")

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        self._check(sequence)
        return len(self.tokens[sequence])

    def own_cells(self, sequence: int) -> int:
        """Cells that nobody shares."""
        self._check(sequence)
        others = {id(c) for s, cells in self._cells.items() if s != sequence for c in cells}
        return sum(id(cell) not in others for cell in self._cells[sequence])

    def allocate(self) -> int:
        """The lowest free id."""
        free = [s for s in range(self.n_sequences) if s not in self.tokens]
        if not free:
            raise OutOfSequencesError(1, 0, self.n_sequences)
        self.tokens[free[0]], self._cells[free[0]] = [], []
        return free[0]

    def release(self, sequence: int) -> None:
        """Forget a sequence."""
        self._check(sequence)
        del self.tokens[sequence], self._cells[sequence]

    def fork(self, sequence: int, length: int | None = None) -> int:
        """Share the first cells."""
        n = self._cut(sequence, self.length(sequence) if length is None else length)
        target = self.allocate()
        self.tokens[target] = self.tokens[sequence][:n]
        self._cells[target] = self._cells[sequence][:n]
        return target

    def trim(self, sequence: int, length: int) -> None:
        """Drop the last cells."""
        n = self._cut(sequence, length)
        del self.tokens[sequence][n:], self._cells[sequence][n:]

    def _cut(self, sequence: int, length: int) -> int:
        have = self.length(sequence)
        if not 0 <= length <= have or (not self.can_trim and 0 < length < have):
            raise PositionError(length, f"the sequence holds {have} tokens", sequence)
        return length

    def append(self, sequence: int, token: int) -> None:
        """Add a token in a cell of its own."""
        self.tokens[sequence].append(token)
        self._cells[sequence].append(object())


class FakeSampler:
    """Greedy, or an inverse-CDF draw at the config's temperature."""

    def __init__(self, config: SamplingConfig) -> None:
        self.config = config
        self.accepted: list[int] = []
        self.closed = False

    def sample(self, logits: FloatArray, draw: float) -> int:
        """The next token."""
        check_finite(logits)
        if self.config.temperature == 0:
            return int(logits.argmax())
        weights = np.exp((logits - logits.max()) / self.config.temperature).astype(np.float64)
        return int(np.searchsorted(np.cumsum(weights / weights.sum()), draw, side="right").clip(0, 257))

    def accept(self, token: int) -> None:
        """Remember it."""
        self.accepted.append(token)

    def close(self) -> None:
        """Remember that, too."""
        self.closed = True


LogitsHook = Callable[[Sequence[int]], FloatArray]


class FakeEngine:
    """An Engine whose logits are a fixed function of a sequence's tokens.

    It refuses what the real engine refuses (positions that do not continue a sequence, unknown ids, too
    many cells), so that tests of what stands on an Engine find mistakes without a model.

    Args:
        n_sequences, n_ctx, n_batch: as of a real context.
        logits: tokens so far -> logits [258]; by default pseudo-random in the last three tokens.
        on_decode: called with every batch before it is computed; it may raise. Without ``can_trim`` a
            NativeError empties the batch's sequences, as it does recurrent states.
    """

    def __init__(
        self,
        *,
        n_sequences: int = 8,
        n_ctx: int = 256,
        n_batch: int = 64,
        add_bos: bool = True,
        can_trim: bool = True,
        logits: LogitsHook | None = None,
        on_decode: Callable[[Batch], None] | None = None,
    ) -> None:
        self.vocabulary = FakeVocabulary(add_bos=add_bos)
        self.memory = FakeMemory(n_sequences, n_ctx, can_trim=can_trim)
        self.n_ctx = n_ctx
        self.n_batch = n_batch
        self.batches: list[Batch] = []
        self.samplers: list[FakeSampler] = []
        self.closed = False
        self._logits = logits or pseudo_random_logits
        self._on_decode = on_decode
        self._abort = threading.Event()

    def decode(self, batch: Batch) -> FloatArray:
        """Append the tokens and compute the wanted logits."""
        if self.closed:
            raise ClosedError("engine")
        assert batch.tokens is not None
        self._abort.clear()
        before = {s: self.memory.length(s) for s in dict.fromkeys(batch.sequences.tolist())}
        if len(batch) > self.memory.free_cells:
            raise OutOfCellsError(len(batch), self.memory.used_cells, self.memory.n_cells)
        rows = []
        try:
            if self._on_decode is not None:
                self._on_decode(batch)
            if self._abort.is_set():
                raise DecodeAbortedError
            columns = (batch.tokens, batch.positions, batch.sequences, batch.outputs)
            for token, position, sequence, wanted in zip(*(c.tolist() for c in columns), strict=True):
                if not 0 <= token < self.vocabulary.n_tokens:
                    raise TokenError(token, self.vocabulary.n_tokens)
                if position != self.memory.length(sequence):
                    raise PositionError(position, f"goes on at {self.memory.length(sequence)}", sequence)
                self.memory.append(sequence, token)
                if wanted:
                    rows.append(self._logits(self.memory.tokens[sequence]))
        except LlamaherdError as error:
            for sequence, length in before.items():
                if isinstance(error, NativeError) and not self.memory.can_trim:
                    length = 0  # a recurrent state that has moved on cannot go back
                del self.memory.tokens[sequence][length:]
                del self.memory._cells[sequence][length:]
            raise
        self.batches.append(batch)
        return np.array(rows, np.float32).reshape(len(rows), self.vocabulary.n_tokens)

    def make_sampler(self, config: SamplingConfig, prompt: Sequence[int] = ()) -> FakeSampler:
        """A FakeSampler; the grammar ``"bad"`` does not parse."""
        if config.grammar == "bad":
            raise GrammarError(config.grammar, "it does not parse")
        sampler = FakeSampler(config)
        self.samplers.append(sampler)
        return sampler

    def abort(self) -> None:
        """Make the decode in flight fail."""
        self._abort.set()

    def close(self) -> None:
        """Refuse further decodes."""
        self.closed = True


def pseudo_random_logits(tokens: Sequence[int]) -> FloatArray:
    """Logits that depend on the last three tokens only; letters are likely, EOS never comes."""
    seed = hash(tuple(tokens[-3:])) & 0xFFFFFFFF
    logits = np.random.default_rng(seed).standard_normal(258).astype(np.float32)
    logits[97:123] += 4
    logits[FakeVocabulary.eos] = -100
    return logits


def text_logits(text: str, prompt: str) -> LogitsHook:
    """Logits that make the greedy continuation of ``prompt`` be ``text`` and then EOS."""
    wanted = [*text.encode(), FakeVocabulary.eos]
    start = len(prompt.encode()) + 1

    def logits(tokens: Sequence[int]) -> FloatArray:
        row = np.zeros(258, np.float32)
        row[wanted[min(len(tokens) - start, len(wanted) - 1)]] = 20
        return row

    return logits
