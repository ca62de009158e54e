"""A request on its way (Group) and each of its continuations (Candidate)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..engine.protocol import FloatArray, TokenSampler
from ..types import Completion, FinishReason, GenerationRequest, Timings, Usage
from .beam import BeamSearch
from .handle import Handle
from .residency import Kept
from .text import TextStream

__all__ = ["Candidate", "Group"]


@dataclass(eq=False)
class Candidate:
    """One continuation of a prompt.

    Attributes:
        tokens: generated so far.
        sequence: its id in the KV cache while it runs.
        computed: how many of prompt + tokens are in the KV cache.
        ahead: how many more are under way (an engine that computes several batches at once).
        prefilling: its next tokens are the prompt's. Those of its own that it has to replay after it gave
            way, or came from elsewhere, are decoded again.
    """

    group: Group
    index: int
    stream: TextStream
    sampler: TokenSampler | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    stop: str | None = None
    finish_reason: FinishReason | None = None
    sequence: int | None = None
    computed: int = 0
    ahead: int = 0
    prefilling: bool = False
    started: int = 0
    served: int = 0

    @property
    def running(self) -> bool:
        """Whether it holds a sequence."""
        return self.sequence is not None

    @property
    def length(self) -> int:
        """Tokens of prompt and continuation."""
        return len(self.group.prompt) + len(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens that are not computed yet."""
        return self.length - self.computed

    @property
    def awaits(self) -> bool:
        """Whether it cannot go on before what is under way has come back."""
        return self.ahead > 0 and not (
            self.prefilling and self.computed + self.ahead < len(self.group.prompt)
        )

    def all_tokens(self) -> NDArray[np.int32]:
        """Prompt and continuation."""
        if not self.tokens:
            return self.group.prompt
        return np.concatenate([self.group.prompt, np.asarray(self.tokens, np.int32)])

    def slice(self, start: int, end: int) -> NDArray[np.int32]:
        """Tokens [start, end) of prompt and continuation."""
        n = len(self.group.prompt)
        if start >= n:
            return np.asarray(self.tokens[start - n : end - n], np.int32)
        return self.all_tokens()[start:end]

    def completion(self) -> Completion:
        """What it came to."""
        return Completion(
            self.index,
            self.text,
            tuple(self.tokens),
            tuple(self.logprobs),
            self.finish_reason or "cancelled",
            self.stop,
        )


@dataclass(eq=False)
class Group:
    """A request: its prompt, its candidates and its submitter's handle.

    Attributes:
        key: order of arrival.
        prompt: int32 token ids.
        end_tokens: tokens that end a candidate.
        seed: of all draws.
        prompt_logits: the logits after the prompt, once it is computed, while candidates wait for them.
        idle: sequences of candidates that have finished.
        beam: the search, of a request with beams; its running beams are ``candidates``.
    """

    key: int
    request: GenerationRequest
    prompt: NDArray[np.int32]
    handle: Handle
    end_tokens: frozenset[int]
    seed: int
    max_tokens: int
    candidates: list[Candidate] = field(default_factory=list)
    prompt_logits: FloatArray | None = None
    beam: BeamSearch | None = None
    idle: list[Kept] = field(default_factory=list)
    cached_tokens: int | None = None
    submitted: float = field(default_factory=time.monotonic)
    started: float | None = None
    first_token: float | None = None

    @property
    def waiting(self) -> list[Candidate]:
        """Candidates that have neither a sequence nor an end."""
        return [c for c in self.candidates if not c.running and c.finish_reason is None]

    @property
    def running(self) -> list[Candidate]:
        """Candidates that hold a sequence."""
        return [c for c in self.candidates if c.running]

    @property
    def can_start(self) -> bool:
        """Whether a waiting candidate may start: the first, or any once the prompt is computed.

        Beams start together, from the first.
        """
        if not self.running:
            return bool(self.waiting)
        return self.beam is None and self.prompt_computed and bool(self.waiting)

    @property
    def prompt_computed(self) -> bool:
        """Whether some running candidate holds the whole prompt."""
        return any(c.computed >= len(self.prompt) for c in self.running)

    @property
    def slots(self) -> int:
        """Sequences that a start takes."""
        return self.beam.width if self.beam is not None else 1

    @property
    def slots_used(self) -> int:
        """Sequences that it holds or has reserved."""
        running = len(self.running)
        return self.beam.width if self.beam is not None and running else running

    def close_samplers(self) -> None:
        """Free what the candidates' samplers hold."""
        for candidate in self.candidates:
            if candidate.sampler is not None:
                candidate.sampler.close()

    def past_deadline(self, now: float) -> bool:
        """Whether its deadline has passed."""
        return self.request.deadline is not None and now - self.submitted > self.request.deadline

    def usage(self, produced: int) -> Usage:
        """The tokens of the prompt, and those produced."""
        return Usage(len(self.prompt), produced, self.cached_tokens or 0)

    def timings(self) -> Timings:
        """Seconds so far."""
        now = time.monotonic()
        started = self.started if self.started is not None else now
        first = self.first_token if self.first_token is not None else now
        return Timings(started - self.submitted, first - started, now - first)
