"""Continuous batching: submit() from any thread, step() in one.

A step reads: take in what was submitted, drop what was cancelled, start who waits (``_admit``), plan
(``policy.plan_step``), compute (``_decode``, ``_prefill``), and emit. Only this file has effects.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..config import SchedulerConfig
from ..engine.protocol import Batch, Engine, FloatArray
from ..errors import (
    ClosedError,
    DeadlineError,
    DecodeAbortedError,
    EmptyPromptError,
    InvalidParameterError,
    LlamaherdError,
    NativeError,
    OutOfSequencesError,
    PromptTooLongError,
    QueueFullError,
    TokenError,
)
from ..logits import check_finite, log_normalizers, top_k
from ..types import Completion, Failed, Finished, FinishReason, GenerationRequest, Logprob, Token
from .beam import BeamSearch
from .draws import new_seed, uniform
from .handle import Handle
from .policy import Running, Waiting, next_waiting, plan_step, victims
from .residency import Residency
from .sequence import Candidate, Group
from .text import TextStream

__all__ = ["Scheduler", "SchedulerStats"]

_HEADROOM = 32  # cells that a start leaves free for those who run


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A look at the scheduler.

    Attributes:
        waiting, running: requests that have not started; candidates that run.
        cached_sequences: idle sequences kept for their prefix.
        used_cells, n_cells: of the KV cache.
        decoded_tokens, prefilled_tokens, reused_tokens: in all, since the start.
        steps: in all.
    """

    waiting: int
    running: int
    cached_sequences: int
    used_cells: int
    n_cells: int
    decoded_tokens: int
    prefilled_tokens: int
    reused_tokens: int
    steps: int


class Scheduler:
    """Shares one engine among requests. The engine must be used by nobody else meanwhile.

    submit(), cancel() and stats() may be called from any thread; step() from one at a time.
    """

    def __init__(self, engine: Engine, config: SchedulerConfig | None = None) -> None:
        self.engine = engine
        self.config = config or SchedulerConfig()
        memory = engine.memory
        self.max_sequences = min(self.config.max_sequences or memory.n_sequences, memory.n_sequences)
        self._chunk = min(self.config.prefill_chunk, engine.n_batch)
        self._residency = Residency(memory, keep=self.config.prefix_cache)
        self._inbox: collections.deque[Group] = collections.deque()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._groups: dict[int, Group] = {}
        self._arrivals = 0
        self._steps = 0
        self._clock = 0
        self._decoded = self._prefilled = self._reused = 0
        self._in_flight: tuple[Group, ...] = ()
        self._closed = False

    # ------------------------------------------------------------------------------- submitting

    def submit(self, request: GenerationRequest) -> Handle:
        """Queue a request; its events come through the handle.

        Raises:
            ClosedError: after close().
            QueueFullError: max_queue requests wait already.
            EmptyPromptError, PromptTooLongError, TokenError, GrammarError, InvalidParameterError: the
                request cannot be served.
            OutOfSequencesError: more beams than there are sequences.
        """
        group = self._make_group(request)
        try:
            with self._lock:
                if self._closed:
                    raise ClosedError("scheduler")
                if self._queued() >= self.config.max_queue:
                    raise QueueFullError(self.config.max_queue)
                self._arrivals += 1
                group.key = self._arrivals
                self._inbox.append(group)
        except LlamaherdError:
            _close_samplers(group)
            raise
        self._wake.set()
        return group.handle

    def _queued(self) -> int:
        return len(self._inbox) + sum(g.started is None for g in list(self._groups.values()))

    def _make_group(self, request: GenerationRequest) -> Group:
        vocabulary = self.engine.vocabulary
        prompt = np.asarray(vocabulary.encode_prompt(request.prompt), np.int32)
        if not len(prompt):
            raise EmptyPromptError
        if len(prompt) >= self.engine.n_ctx:
            raise PromptTooLongError(len(prompt), self.engine.n_ctx)
        for i, token in enumerate(request.stop_tokens):
            if not 0 <= token < vocabulary.n_tokens:
                raise TokenError(token, vocabulary.n_tokens, i)
        if request.beams is not None and request.beams > self.max_sequences:
            raise OutOfSequencesError(request.beams, self.max_sequences, self.max_sequences)
        seed = request.sampling.seed if request.sampling.seed is not None else new_seed()
        end = frozenset(request.stop_tokens)
        if not request.ignore_eos:
            end |= vocabulary.end_tokens
        group = Group(
            key=0,
            request=request,
            prompt=prompt,
            handle=Handle(request.request_id, self._on_cancel),
            end_tokens=end,
            seed=seed,
            max_tokens=min(request.max_tokens, self.engine.n_ctx - len(prompt)),
        )
        try:
            self._make_candidates(group)
        except LlamaherdError:
            _close_samplers(group)
            raise
        return group

    def _make_candidates(self, group: Group) -> None:
        request = group.request
        if request.beams is not None:
            group.candidates = [Candidate(group, 0, TextStream())]
            group.beam = self._new_search(group)
            return
        indices = range(request.n) if request.indices is None else request.indices
        for index in indices:
            candidate = Candidate(group, index, TextStream(request.stop))
            group.candidates.append(candidate)
            done = list(request.resume.get(index, ()))
            if not group.candidates[1:] or done:
                self._ensure_sampler(candidate)  # here, so that a bad grammar is the submitter's to see
            for i, token in enumerate(done):
                if not 0 <= token < self.engine.vocabulary.n_tokens:
                    raise TokenError(token, self.engine.vocabulary.n_tokens, i)
                candidate.tokens.append(token)
                self._sampler_of(candidate).accept(token)
                candidate.text += candidate.stream.push(self._piece(group, token)).text
            if len(candidate.tokens) >= group.max_tokens:
                raise InvalidParameterError(
                    "resume", len(candidate.tokens), f"fewer tokens than max_tokens ({group.max_tokens})"
                )

    def _new_search(self, group: Group) -> BeamSearch:
        request = group.request
        return BeamSearch(
            request.beams or 1,
            group.max_tokens,
            request.length_penalty,
            group.end_tokens,
            request.stop,
            self.engine.vocabulary.piece,
        )

    def _ensure_sampler(self, candidate: Candidate) -> None:
        if candidate.sampler is None:
            group = candidate.group
            seed = (group.seed + candidate.index) % 2**32  # of what llama.cpp draws itself (mirostat, XTC)
            config = dataclasses.replace(group.request.sampling, seed=seed)
            candidate.sampler = self.engine.make_sampler(config, group.prompt.tolist())

    def _sampler_of(self, candidate: Candidate):  # type: ignore[no-untyped-def]
        self._ensure_sampler(candidate)
        assert candidate.sampler is not None
        return candidate.sampler

    def _on_cancel(self, handle: Handle) -> None:
        in_flight = self._in_flight
        if in_flight and all(g.handle.cancelled for g in in_flight):
            self.engine.abort()
        self._wake.set()

    # --------------------------------------------------------------------------------- stepping

    def step(self) -> bool:
        """Advance every running candidate by one batch; whether there was anything to do."""
        self._take_in()
        self._drop_ended()
        self._admit()
        worked = False
        views = self._views()
        plan = plan_step(list(views.values()), self._chunk)
        by_key = {id(c): c for g in self._groups.values() for c in g.running}
        decoding = [by_key[k] for k in plan.decode]
        if decoding:
            self._decode(self._with_room(decoding))
            worked = True
        if plan.prefill is not None:
            candidate = by_key[plan.prefill]
            if candidate.running and candidate.finish_reason is None:
                self._prefill(candidate, plan.start, plan.end)
                worked = True
        if worked:
            self._steps += 1
        return worked

    def _views(self) -> dict[int, Running]:
        limit = self.config.max_buffered_events
        return {
            id(c): Running(
                key=id(c),
                computed=c.computed,
                pending=c.pending,
                started=c.started,
                served=c.served,
                paused=g.handle.backlog >= limit,
                prefilling=c.prefilling,
            )
            for g in self._groups.values()
            for c in g.running
            if c.pending
        }

    def _take_in(self) -> None:
        with self._lock:
            self._wake.clear()
            while self._inbox:
                group = self._inbox.popleft()
                self._groups[group.key] = group

    def _drop_ended(self) -> None:
        now = time.monotonic()
        for group in list(self._groups.values()):
            if group.handle.cancelled:
                self._end_all(group, "cancelled")
            elif group.past_deadline(now):
                if any(c.tokens for c in group.candidates) or group.beam:
                    self._end_all(group, "deadline")
                else:
                    self._fail(group, DeadlineError(group.request.deadline or 0))

    # ---------------------------------------------------------------------------------- admission

    def _admit(self) -> None:
        """Start waiting candidates while there are slots and room."""
        while True:
            used = sum(g.slots_used for g in self._groups.values())
            client_running: dict[str, int] = collections.Counter()
            for g in self._groups.values():
                client_running[g.request.client] += g.slots_used
            waiting = [
                Waiting(g.key, g.request.client, g.key, g.slots_used, g.slots)
                for g in self._groups.values()
                if g.can_start and not (g.beam and g.running)
            ]
            chosen = next_waiting(waiting, self.max_sequences - used, client_running)
            if chosen is None or not self._start(self._groups[chosen.key]):
                return

    def _start(self, group: Group) -> bool:
        """Give the group's next candidate a sequence; False if there is no room for it now."""
        candidate = group.waiting[0]
        tokens = candidate.all_tokens()
        ready = group.prompt_logits is not None and not candidate.tokens
        wanted = tokens if ready else tokens[:-1]
        placed = self._residency.place(wanted, self._live())
        if placed is None:
            return False
        sequence, reused = placed
        others = any(g.running for g in self._groups.values())
        needed = len(tokens) - reused + (_HEADROOM if others else 1)
        if not self._residency.make_room(cells=needed) and others:
            self._residency.retire(sequence, tokens[:reused])
            return False
        candidate.sequence, candidate.computed = sequence, reused
        candidate.prefilling = candidate.pending > 0
        candidate.started = self._next_clock()
        self._reused += reused
        if group.started is None:
            group.started = time.monotonic()
        if group.cached_tokens is None:
            group.cached_tokens = min(reused, len(group.prompt))
        try:
            if group.beam is None:
                self._ensure_sampler(candidate)
            if not candidate.pending:
                logits = group.prompt_logits
                assert logits is not None
                self._advance([candidate], logits[None])
        except LlamaherdError as error:
            self._fail(group, error)
        return True

    def _live(self) -> Iterator[tuple[int, NDArray[np.int32]]]:
        for group in self._groups.values():
            for c in group.running:
                if c.sequence is not None and c.computed:
                    yield c.sequence, c.slice(0, c.computed)

    def _next_clock(self) -> int:
        self._clock += 1
        return self._clock

    # -------------------------------------------------------------------------------- computing

    def _with_room(self, decoding: list[Candidate]) -> list[Candidate]:
        """Those of the candidates that fit one more token each; others give way, the youngest first."""
        if self._residency.make_room(cells=len(decoding)):
            return decoding
        views = self._views()
        order = victims(list(views.values()))
        by_key = {id(c): c for g in self._groups.values() for c in g.running}
        for key in order:
            candidate = by_key[key]
            if candidate.running:
                self._give_way(candidate)
            decoding = [c for c in decoding if c.running]
            if self.engine.memory.free_cells >= len(decoding):
                break
        return decoding

    def _give_way(self, candidate: Candidate) -> None:
        """Take a candidate's sequence; it starts again, with what it has produced, when there is room."""
        group = candidate.group
        if group.beam is None:
            self._vacate(candidate, keep=False)
            return
        for lane in group.running:
            self._vacate(lane, keep=False)
        group.candidates = [Candidate(group, 0, TextStream())]
        group.beam = self._new_search(group)
        group.prompt_logits = None

    def _vacate(self, candidate: Candidate, *, keep: bool) -> None:
        if candidate.sequence is not None:
            held = candidate.slice(0, candidate.computed)
            self._residency.retire(candidate.sequence, held, keep=keep)
            candidate.sequence, candidate.computed, candidate.prefilling = None, 0, False

    def _decode(self, candidates: Sequence[Candidate]) -> None:
        """One token of each candidate in one batch."""
        if not candidates:
            return
        batch = Batch(
            tokens=np.array([c.tokens[-1] for c in candidates], np.int32),
            positions=np.array([c.computed for c in candidates], np.int32),
            sequences=np.array([c.sequence for c in candidates], np.int32),
            outputs=np.ones(len(candidates), np.bool_),
        )
        logits = self._compute(batch, candidates)
        if logits is None:
            return
        self._decoded += len(candidates)
        for c in candidates:
            c.computed += 1
        self._advance(candidates, logits)

    def _prefill(self, candidate: Candidate, start: int, end: int) -> None:
        """Tokens [start, end) of one candidate's prompt (or replay)."""
        if not self._residency.make_room(cells=end - start):
            for key in victims(list(self._views().values()), keep=id(candidate)):
                other = next((c for g in self._groups.values() for c in g.running if id(c) == key), None)
                if other is not None:
                    self._give_way(other)
                if self.engine.memory.free_cells >= end - start:
                    break
            else:
                self._give_way(candidate)
                return
        if not candidate.running:
            return
        assert candidate.sequence is not None
        n = end - start
        last = end == candidate.length
        prompt_end = end == len(candidate.group.prompt)
        outputs = np.zeros(n, np.bool_)
        outputs[-1] = last or prompt_end
        batch = Batch(
            tokens=candidate.slice(start, end),
            positions=np.arange(start, end, dtype=np.int32),
            sequences=np.full(n, candidate.sequence, np.int32),
            outputs=outputs,
        )
        logits = self._compute(batch, [candidate])
        if logits is None:
            return
        self._prefilled += n
        candidate.computed = end
        candidate.served = self._steps + 1
        group = candidate.group
        if prompt_end and len(group.candidates) > 1 and group.waiting:
            group.prompt_logits = logits[0].copy()
        if last:
            candidate.prefilling = False
            self._advance([candidate], logits)

    def _compute(self, batch: Batch, candidates: Sequence[Candidate]) -> FloatArray | None:
        """Decode a batch; None if it came to nothing, in which case all is as it was or has failed."""
        groups = tuple(dict.fromkeys(c.group for c in candidates))
        self._in_flight = groups
        try:
            return self.engine.decode(batch)
        except DecodeAbortedError:
            return None  # somebody cancelled; whoever did not is tried again in the next step
        except LlamaherdError as error:
            self._isolate(candidates, groups, error)
            return None
        finally:
            self._in_flight = ()

    def _isolate(
        self, candidates: Sequence[Candidate], groups: Sequence[Group], error: LlamaherdError
    ) -> None:
        """A batch failed: find out whose fault it is by computing each candidate alone."""
        if len(groups) == 1:
            self._fail(groups[0], error)
            return
        for candidate in candidates:
            if candidate.running:
                self._decode([candidate])

    # --------------------------------------------------------------------------------- emitting

    def _advance(self, candidates: Sequence[Candidate], logits: FloatArray) -> None:
        """Turn each candidate's logits into its next token; those of beams all together."""
        norms = log_normalizers(logits)
        beams: dict[int, list[int]] = {}
        for row, candidate in enumerate(candidates):
            group = candidate.group
            if candidate.finish_reason is not None or group.key not in self._groups:
                continue
            try:
                check_finite(logits[row])
                if group.beam is not None:
                    beams.setdefault(group.key, []).append(row)
                else:
                    self._next_token(candidate, logits[row], float(norms[row]))
            except LlamaherdError as error:
                self._fail(group, error)
        for key, rows in beams.items():
            found = self._groups.get(key)
            if found is not None:
                self._advance_beams(found, [candidates[r] for r in rows], logits[rows])

    def _next_token(self, candidate: Candidate, logits: FloatArray, norm: float) -> None:
        group, request = candidate.group, candidate.group.request
        allowed = logits
        if request.ignore_eos:
            allowed = logits.copy()
            allowed[list(self.engine.vocabulary.end_tokens)] = -np.inf
        draw = uniform(group.seed, candidate.index, len(candidate.tokens))
        token = self._sampler_of(candidate).sample(allowed, draw)
        self._sampler_of(candidate).accept(token)
        if group.first_token is None:
            group.first_token = time.monotonic()
        logprob = float(logits[token]) - norm
        candidate.tokens.append(token)
        candidate.logprobs.append(logprob)
        ends = token in group.end_tokens
        full = len(candidate.tokens) >= group.max_tokens
        piece = b"" if ends else self._piece(group, token)
        delta = candidate.stream.push(piece, final=ends or full)
        candidate.text += delta.text
        reason: FinishReason | None = None
        if ends or delta.stop is not None:
            reason, candidate.stop = "stop", delta.stop
        elif full:
            reason = "length"
        top = self._top(logits, norm, request.logprobs) if request.logprobs else ()
        event = Token(candidate.index, token, delta.text, logprob, top, reason, candidate.stop, piece)
        group.handle.push(event)
        if reason is not None:
            self._end(candidate, reason)

    def _piece(self, group: Group, token: int) -> bytes:
        return b"" if token in group.end_tokens else self.engine.vocabulary.piece(token)

    def _top(self, logits: FloatArray, norm: float, k: int) -> tuple[Logprob, ...]:
        piece = self.engine.vocabulary.piece
        return tuple(Logprob(int(t), piece(int(t)), float(logits[t]) - norm) for t in top_k(logits, k))

    def _advance_beams(self, group: Group, lanes: list[Candidate], logits: FloatArray) -> None:
        """Let the search choose, and give each new beam its parent's sequence, or a fork of it."""
        assert group.beam is not None
        if group.first_token is None:
            group.first_token = time.monotonic()
        parents = group.beam.advance(logits)
        if not parents:
            self._finish_beams(group)
            return
        memory = self.engine.memory
        for i, lane in enumerate(lanes):
            if i not in parents and lane.sequence is not None:
                memory.release(lane.sequence)
                lane.sequence = None
        taken: set[int] = set()
        successors: list[Candidate] = []
        for beam, parent in zip(group.beam.running, parents, strict=True):
            lane = lanes[parent]
            assert lane.sequence is not None
            if parent in taken:
                self._residency.make_room(sequences=1)
                sequence = memory.fork(lane.sequence)
            else:
                taken.add(parent)
                sequence = lane.sequence
            successor = Candidate(group, len(successors), beam.stream, tokens=list(beam.tokens))
            successor.sequence, successor.computed = sequence, lane.computed
            successor.started = lane.started
            successors.append(successor)
        group.candidates = successors

    def _finish_beams(self, group: Group) -> None:
        assert group.beam is not None
        completions = []
        for rank, hypothesis in enumerate(group.beam.best(group.request.n)):
            beam = hypothesis.beam
            completion = Completion(
                rank, beam.text, beam.tokens, beam.logprobs, hypothesis.reason, hypothesis.stop
            )
            completions.append(completion)
            for i, (token, logprob) in enumerate(zip(beam.tokens, beam.logprobs, strict=True)):
                last = i == len(beam.tokens) - 1
                text, reason = (beam.text, hypothesis.reason) if last else ("", None)
                stop = hypothesis.stop if last else None
                piece = self._piece(group, token)
                group.handle.push(Token(rank, token, text, logprob, (), reason, stop, piece))
        self._close(group, Finished(tuple(completions), group.usage(), group.timings()))

    def _end(self, candidate: Candidate, reason: FinishReason) -> None:
        """A candidate is complete; the request is when all are."""
        group = candidate.group
        candidate.finish_reason = reason
        # one sequence holds the whole prompt for the next request; its siblings would hold little more
        kept = any(c.finish_reason is not None and c is not candidate for c in group.candidates)
        self._vacate(candidate, keep=not kept)
        if candidate.sampler is not None:
            candidate.sampler.close()
        if all(c.finish_reason is not None for c in group.candidates):
            completions = tuple(c.completion() for c in group.candidates)
            self._close(group, Finished(completions, group.usage(), group.timings()))

    def _end_all(self, group: Group, reason: FinishReason) -> None:
        for candidate in group.candidates:
            if candidate.finish_reason is None:
                candidate.text += candidate.stream.push(b"", final=True).text
                candidate.finish_reason = reason
        completions = tuple(c.completion() for c in group.candidates)
        self._close(group, Finished(completions, group.usage(), group.timings()))

    def _fail(self, group: Group, error: LlamaherdError) -> None:
        self._close(group, Failed(error, group.usage()), keep=False)

    def _close(self, group: Group, event: Finished | Failed, *, keep: bool = True) -> None:
        self._groups.pop(group.key, None)
        for i, candidate in enumerate(group.running):
            self._vacate(candidate, keep=keep and i == 0)
        _close_samplers(group)
        group.prompt_logits = None
        group.handle.push(event)

    # --------------------------------------------------------------------------------- lifetime

    def run_until_idle(self, max_steps: int = 1_000_000) -> None:
        """Step until nothing is left to do, in the caller's thread."""
        for _ in range(max_steps):
            if not self.step() and not self._inbox:
                return

    def wait(self, timeout: float | None = None) -> None:
        """Sleep until something is submitted or cancelled."""
        self._wake.wait(timeout)

    def wake(self) -> None:
        """End a wait()."""
        self._wake.set()

    @property
    def busy(self) -> bool:
        """Whether any request is open."""
        return bool(self._inbox or self._groups)

    def fail_all(self, error: Exception) -> None:
        """End every open request with an error, after something that should not have happened."""
        if not isinstance(error, LlamaherdError):
            error = NativeError(f"the scheduler failed: {error!r}")
        self._take_in()
        for group in list(self._groups.values()):
            self._fail(group, error)

    def close(self) -> None:
        """Refuse new requests and end the open ones with ClosedError; idempotent. Not beside step()."""
        with self._lock:
            self._closed = True
        self.fail_all(ClosedError("scheduler"))
        self._residency.clear()

    def drop_cache(self) -> None:
        """Forget all idle sequences. Not beside step()."""
        self._residency.clear()

    def make_room(self, *, cells: int = 0, sequences: int = 0) -> bool:
        """Evict idle sequences until that much is free; whether it is. Not beside step()."""
        return self._residency.make_room(cells=cells, sequences=sequences)

    def idle(self) -> list[tuple[int, NDArray[np.int32]]]:
        """Idle sequences and their tokens, least recently used first. Not beside step()."""
        return self._residency.idle()

    def adopt(self, sequence: int, tokens: NDArray[np.int32]) -> None:
        """Take in a restored sequence for prompts that begin as it does. Not beside step()."""
        self._residency.adopt(sequence, tokens)

    def stats(self) -> SchedulerStats:
        """A look at what goes on."""
        memory = self.engine.memory
        groups = list(self._groups.values())
        return SchedulerStats(
            waiting=len(self._inbox) + sum(g.started is None for g in groups),
            running=sum(len(g.running) for g in groups),
            cached_sequences=len(self._residency.cache),
            used_cells=memory.n_cells - memory.free_cells,
            n_cells=memory.n_cells,
            decoded_tokens=self._decoded,
            prefilled_tokens=self._prefilled,
            reused_tokens=self._reused,
            steps=self._steps,
        )


def _close_samplers(group: Group) -> None:
    for candidate in group.candidates:
        if candidate.sampler is not None:
            candidate.sampler.close()
