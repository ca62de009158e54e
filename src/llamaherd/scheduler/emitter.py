"""From logits to tokens, text, events and endings."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np

from ..engine.picks import pick_token
from ..engine.protocol import Draw, Engine, FloatArray, Pick, Row
from ..errors import LlamaherdError
from ..logits import check_finite, log_normalizers
from ..types import Completion, Failed, Finished, FinishReason, Logprob, Token
from .draws import uniform
from .intake import Intake
from .residency import Residency
from .sequence import Candidate, Group

__all__ = ["Emitter"]


class Emitter:
    """Advances candidates by a token, and ends them.

    ``groups`` are the open requests by key; a request that ends is taken out of it.
    """

    def __init__(
        self, engine: Engine, intake: Intake, residency: Residency, groups: dict[int, Group]
    ) -> None:
        self._memory = engine.memory
        self._vocabulary = engine.vocabulary
        self._end_tokens = tuple(sorted(engine.vocabulary.end_tokens))
        self._intake = intake
        self._residency = residency
        self._groups = groups

    # ------------------------------------------------------------------------------- advancing

    def advance(self, candidates: Sequence[Candidate], rows: FloatArray | Sequence[Row]) -> None:
        """Take what came of each candidate's newest token, row by row, further; beams all together."""
        if isinstance(rows, np.ndarray):
            self._advance_logits(candidates, rows)
            return
        logits = [(c, row) for c, row in zip(candidates, rows, strict=True) if isinstance(row, np.ndarray)]
        for candidate, row in zip(candidates, rows, strict=True):
            if not self._open(candidate):
                continue
            if isinstance(row, LlamaherdError):
                self.fail(candidate.group, row)
            elif isinstance(row, Pick):
                try:
                    self.take(candidate, row)
                except LlamaherdError as error:
                    self.fail(candidate.group, error)
        if logits:
            self._advance_logits([c for c, _ in logits], np.stack([row for _, row in logits]))

    def _open(self, candidate: Candidate) -> bool:
        return candidate.finish_reason is None and candidate.group.key in self._groups

    def _advance_logits(self, candidates: Sequence[Candidate], logits: FloatArray) -> None:
        norms = log_normalizers(logits)
        beams: dict[int, list[int]] = {}
        for row, candidate in enumerate(candidates):
            group = candidate.group
            if not self._open(candidate):
                continue
            try:
                if np.isnan(norms[row]):
                    check_finite(logits[row])
                if group.beam is not None:
                    beams.setdefault(group.key, []).append(row)
                else:
                    self._next_token(candidate, logits[row], float(norms[row]))
            except LlamaherdError as error:
                self.fail(group, error)
        for key, rows in beams.items():
            open_group = self._groups.get(key)
            if open_group is not None:
                try:
                    self._advance_beams(open_group, [candidates[r] for r in rows], logits[rows])
                except LlamaherdError as error:
                    self.fail(open_group, error)

    def draw_of(self, candidate: Candidate) -> Draw:
        """How the candidate's next token is drawn."""
        request, group = candidate.group.request, candidate.group
        number = uniform(group.seed, candidate.index, len(candidate.tokens))
        without = self._end_tokens if request.ignore_eos else ()
        return Draw(request.sampling, number, request.logprobs or 0, without)

    def _next_token(self, candidate: Candidate, logits: FloatArray, norm: float) -> None:
        sampler = self._intake.sampler(candidate)
        self.take(candidate, pick_token(sampler, logits, norm, self.draw_of(candidate)))

    def take(self, candidate: Candidate, pick: Pick) -> None:
        """Append a token that was drawn for a candidate of an open request."""
        group, token = candidate.group, pick.token
        self._intake.sampler(candidate).accept(token)
        self._note_first_token(group)
        candidate.tokens.append(token)
        candidate.logprobs.append(pick.logprob)
        ends = pick.complete or token in group.end_tokens
        full = len(candidate.tokens) >= group.max_tokens
        text = b"" if pick.complete else self._intake.piece(group, token)
        delta = candidate.stream.push(text, final=ends or full)
        candidate.text += delta.text
        reason: FinishReason | None = None
        if ends or delta.stop is not None:
            reason, candidate.stop = "stop", delta.stop
        elif full:
            reason = "length"
        piece = self._vocabulary.piece
        top = tuple(Logprob(t, piece(t), logprob) for t, logprob in pick.top)
        event = Token(candidate.index, token, delta.text, pick.logprob, top, reason, candidate.stop, text)
        group.handle.push(event)
        if reason is not None:
            self._end(candidate, reason)

    @staticmethod
    def _note_first_token(group: Group) -> None:
        if group.first_token is None:
            group.first_token = time.monotonic()

    # ----------------------------------------------------------------------------------- beams

    def _advance_beams(self, group: Group, lanes: list[Candidate], logits: FloatArray) -> None:
        """Let the search choose, and give each new beam its parent's sequence, or a fork of it."""
        assert group.beam is not None
        self._note_first_token(group)
        parents = group.beam.advance(logits)
        if not parents:
            self._end_beams(group)
            return
        for i, lane in enumerate(lanes):
            if i not in parents:
                self.vacate(lane, keep=False)
        taken: set[int] = set()
        successors: list[Candidate] = []
        for beam, parent in zip(group.beam.running, parents, strict=True):
            lane = lanes[parent]
            assert lane.sequence is not None
            sequence = lane.sequence
            if parent in taken:
                self._residency.make_room(sequences=1)
                sequence = self._memory.fork(lane.sequence)
            taken.add(parent)
            successor = Candidate(group, len(successors), beam.stream, tokens=list(beam.tokens))
            successor.sequence, successor.computed = sequence, lane.computed
            successor.started = lane.started
            successors.append(successor)
        group.candidates = successors

    def _end_beams(self, group: Group) -> None:
        """End a beam search with what it has found, best first."""
        assert group.beam is not None
        completions = tuple(
            Completion(rank, h.beam.text, h.beam.tokens, h.beam.logprobs, h.reason, h.stop)
            for rank, h in enumerate(group.beam.best(group.request.n))
        )
        for completion in completions:
            self._push_all(group, completion)
        self._finish(group, completions)

    def _push_all(self, group: Group, completion: Completion) -> None:
        """A completion's tokens as events; all of its text comes with the last one."""
        last = len(completion.tokens) - 1
        for i, (token, logprob) in enumerate(zip(completion.tokens, completion.logprobs, strict=True)):
            text, reason = (completion.text, completion.finish_reason) if i == last else ("", None)
            stop = completion.stop if i == last else None
            piece = self._intake.piece(group, token)
            group.handle.push(Token(completion.index, token, text, logprob, (), reason, stop, piece))

    # ---------------------------------------------------------------------------------- ending

    def _end(self, candidate: Candidate, reason: FinishReason) -> None:
        """A candidate is complete; the request is when all are."""
        group = candidate.group
        candidate.finish_reason = reason
        self.vacate(candidate)
        if candidate.sampler is not None:
            candidate.sampler.close()
        if all(c.finish_reason is not None for c in group.candidates):
            self._finish(group, _completions(group))

    def end_all(self, group: Group, reason: FinishReason) -> None:
        """End a request as far as it has come."""
        if group.beam is not None:
            group.beam.stop(reason)
            self._end_beams(group)
            return
        for candidate in group.candidates:
            if candidate.finish_reason is None:
                candidate.text += candidate.stream.push(b"", final=True).text
                candidate.finish_reason = reason
        self._finish(group, _completions(group))

    def _finish(self, group: Group, completions: tuple[Completion, ...]) -> None:
        produced = sum(len(c.tokens) for c in completions)
        self._close(group, Finished(completions, group.usage(produced), group.timings()))

    def fail(self, group: Group, error: LlamaherdError) -> None:
        """End a request with an error."""
        self._close(group, Failed(error, group.usage(sum(len(c.tokens) for c in group.candidates))))

    def _close(self, group: Group, event: Finished | Failed) -> None:
        self._groups.pop(group.key, None)
        try:
            for candidate in group.running:
                self.vacate(candidate, keep=isinstance(event, Finished))
            self._residency.settle(group.idle)
            group.close_samplers()
            group.prompt_logits = None
        finally:  # whatever happens: somebody waits for this
            group.handle.push(event)

    def vacate(self, candidate: Candidate, *, keep: bool = True) -> None:
        """Take a candidate's sequence; ``keep`` it idle for prompts that begin alike."""
        if candidate.sequence is None:
            return
        held = candidate.slice(0, candidate.computed)
        kept = self._residency.retire(candidate.sequence, held, keep=keep)
        if kept is not None:
            candidate.group.idle.append(kept)
        candidate.sequence, candidate.computed, candidate.ahead = None, 0, 0
        candidate.prefilling = False


def _completions(group: Group) -> tuple[Completion, ...]:
    return tuple(c.completion() for c in _by_index(group.candidates))


def _by_index(candidates: Iterable[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda c: c.index)
