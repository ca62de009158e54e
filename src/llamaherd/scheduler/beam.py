"""Beam search over log-probabilities: pure, no engine.

The method is transformers' (GenerationMixin._beam_search with early_stopping=False), so that both give the
same beams: of the best (1 + end tokens) * width continuations those that end within the best ``width``
become hypotheses, the best ``width`` others go on, and the search stops when no running beam, at its
present length, can beat the worst hypothesis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..engine.protocol import FloatArray
from ..logits import log_normalizers, top_k
from ..types import FinishReason
from .text import TextStream

__all__ = ["Beam", "BeamSearch", "Hypothesis"]


@dataclass(frozen=True, slots=True)
class Beam:
    """A running beam: its tokens, each one's log-probability, their sum, and its text so far."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    total: float
    stream: TextStream
    text: str


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam; ``score`` is its log-probability over length ** length_penalty."""

    beam: Beam
    score: float
    reason: FinishReason
    stop: str | None


@dataclass(frozen=True, slots=True)
class _Continuation:
    parent: int
    token: int
    logprob: float
    total: float


class BeamSearch:
    """The state of one search.

    Args:
        width: number of beams.
        max_tokens: beams end at this length.
        length_penalty: exponent of the length that divides a hypothesis' log-probability.
        end_tokens: tokens that end a beam.
        stop: texts that end a beam.
        piece: the bytes of a token.
        forbidden: tokens that no beam takes.
    """

    def __init__(
        self,
        width: int,
        max_tokens: int,
        length_penalty: float,
        end_tokens: frozenset[int],
        stop: Sequence[str],
        piece: Callable[[int], bytes],
        *,
        forbidden: frozenset[int] = frozenset(),
    ) -> None:
        self.width = width
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._end_tokens = end_tokens
        self._piece = piece
        self._forbidden = list(forbidden)
        self.running: list[Beam] = [Beam((), (), 0.0, TextStream(stop), "")]
        self.hypotheses: list[Hypothesis] = []
        self.done = False

    def advance(self, rows: FloatArray) -> list[int]:
        """Take the logits [running, n_vocab] of the running beams and replace them by their successors.

        Returns the parent of each new running beam; empty when the search is over.
        """
        best = self._continuations(rows)
        going_on: list[tuple[int, Beam]] = []
        for rank, continuation in enumerate(best):
            beam, reason, stop = self._extend(continuation)
            if reason is None:
                if len(going_on) < self.width:
                    going_on.append((continuation.parent, beam))
            elif rank < self.width:
                self._finish(beam, reason, stop)
        self.running = [beam for _, beam in going_on]
        self.done = not self.running or not self._improvement_possible()
        return [] if self.done else [parent for parent, _ in going_on]

    def stop(self, reason: FinishReason) -> None:
        """End the search as far as it has come: the running beams become hypotheses."""
        for beam in self.running:
            if beam.tokens:
                held = beam.stream.fork().push(b"", final=True)
                self._finish(replace(beam, text=beam.text + held.text), reason, None)
        self.running, self.done = [], True

    def best(self, n: int) -> list[Hypothesis]:
        """The n best hypotheses, best first."""
        return self.hypotheses[:n]

    def _continuations(self, rows: FloatArray) -> list[_Continuation]:
        keep = max(2, 1 + len(self._end_tokens)) * self.width
        found = []
        for parent, (row, norm) in enumerate(zip(rows, log_normalizers(rows), strict=True)):
            beam = self.running[parent]
            if self._forbidden:
                row = row.copy()
                row[self._forbidden] = -np.inf
            for token in top_k(row, keep):
                if row[token] == -np.inf:
                    break
                logprob = float(row[token] - norm)
                found.append(_Continuation(parent, int(token), logprob, beam.total + logprob))
        found.sort(key=lambda c: (-c.total, c.parent, c.token))
        return found[:keep]

    def _extend(self, c: _Continuation) -> tuple[Beam, FinishReason | None, str | None]:
        parent = self.running[c.parent]
        stream = parent.stream.fork()
        ends = c.token in self._end_tokens
        last = len(parent.tokens) + 1 >= self._max_tokens
        delta = stream.push(b"" if ends else self._piece(c.token), final=ends or last)
        beam = Beam(
            (*parent.tokens, c.token),
            (*parent.logprobs, c.logprob),
            c.total,
            stream,
            parent.text + delta.text,
        )
        if ends or delta.stop is not None:
            return beam, "stop", delta.stop
        return beam, "length" if last else None, None

    def _finish(self, beam: Beam, reason: FinishReason, stop: str | None) -> None:
        score = beam.total / len(beam.tokens) ** self._length_penalty
        self.hypotheses.append(Hypothesis(beam, score, reason, stop))
        self.hypotheses.sort(key=lambda h: -h.score)
        del self.hypotheses[self.width :]

    def _improvement_possible(self) -> bool:
        if len(self.hypotheses) < self.width:
            return True
        best = self.running[0]
        attainable: float = best.total / len(best.tokens) ** self._length_penalty
        return attainable > self.hypotheses[-1].score
