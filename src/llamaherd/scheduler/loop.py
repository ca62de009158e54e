"""Continuous batching: submit() from any thread, step() in one.

A step reads: take in what was submitted, drop what was cancelled, start who waits (``_admit``), plan
(``policy.plan_step``), compute (``_decode``, ``_prefill``); the emitter turns logits into events.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..config import SchedulerConfig
from ..engine.protocol import Batch, Draw, Engine
from ..errors import (
    ClosedError,
    DeadlineError,
    DecodeAbortedError,
    LlamaherdError,
    NativeError,
    OutOfCellsError,
    QueueFullError,
    WorkerError,
)
from ..types import GenerationRequest
from .emitter import Emitter
from .flight import Flight, Flights
from .handle import Handle
from .intake import Intake
from .policy import Running, Waiting, next_waiting, plan_step, victims
from .prefix_cache import LogitsCache
from .residency import Residency
from .sequence import Candidate, Group

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
        self._groups: dict[int, Group] = {}
        self._residency = Residency(memory, keep=self.config.prefix_cache)
        self._logits = LogitsCache()
        self._intake = Intake(engine, self.max_sequences)
        self._emitter = Emitter(engine, self._intake, self._residency, self._groups)
        self._inbox: collections.deque[Group] = collections.deque()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._arrivals = self._starts = self._steps = 0
        self._decoded = self._prefilled = self._reused = 0
        self._flights = Flights(engine)
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
        self._check_room()
        group = self._intake.group(request, self._on_cancel)
        try:
            with self._lock:
                self._check_room()
                self._arrivals += 1
                group.key = self._arrivals
                self._inbox.append(group)
        except LlamaherdError:
            group.close_samplers()
            raise
        self._wake.set()
        return group.handle

    def _check_room(self) -> None:
        if self._closed:
            raise ClosedError("scheduler")
        if self._queued() >= self.config.max_queue:
            raise QueueFullError(self.config.max_queue)

    def _queued(self) -> int:
        return len(self._inbox) + sum(g.started is None for g in list(self._groups.values()))

    def _on_cancel(self, _handle: Handle) -> None:
        in_flight = self._flights.groups
        if in_flight and all(g.handle.cancelled for g in in_flight):
            self.engine.abort()
        self._wake.set()

    # --------------------------------------------------------------------------------- stepping

    def step(self) -> bool:
        """Advance every running candidate by one batch; whether there was anything to do."""
        self._take_in()
        self._drop_ended()
        self._admit()
        plan = plan_step(self._views(), self._chunk)
        by_key = {id(c): c for c in self._running()}
        decoding = [by_key[key] for key in plan.decode]
        prefilling = by_key.get(plan.prefill) if plan.prefill is not None else None
        if decoding:
            self._decode(self._with_room(self._share(decoding)))
        if prefilling is not None and prefilling.running and not prefilling.awaits:
            self._prefill(prefilling, plan.start, plan.end)
        worked = bool(decoding) or prefilling is not None
        if len(self._flights) and not worked:
            self._land()
            worked = True
        self._steps += worked
        return worked

    def _share(self, decoding: list[Candidate]) -> list[Candidate]:
        """Those who decode now, so that others are left for the other stages of a pipeline."""
        if self._flights.depth == 1:
            return decoding
        total = sum(not c.prefilling for c in self._running())
        most = -(-total // self._flights.depth)
        whole = [c for c in decoding if c.group.beam is not None and c.group is decoding[0].group]
        return whole or [c for c in decoding if c.group.beam is None][:most]

    def _running(self) -> Iterator[Candidate]:
        for group in self._groups.values():
            yield from group.running

    def _views(self) -> list[Running]:
        limit = self.config.max_buffered_events
        return [
            Running(
                key=id(c),
                computed=c.computed + c.ahead,
                pending=(len(c.group.prompt) - c.computed if c.prefilling else c.pending) - c.ahead,
                started=c.started,
                served=c.served,
                paused=c.group.handle.backlog >= limit or c.awaits,
                prefilling=c.prefilling,
            )
            for c in self._running()
        ]

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
                self._emitter.end_all(group, "cancelled")
            elif group.past_deadline(now):
                if any(c.tokens for c in group.candidates):
                    self._emitter.end_all(group, "deadline")
                else:
                    self._emitter.fail(group, DeadlineError(group.request.deadline or 0))

    # -------------------------------------------------------------------------------- admission

    def _admit(self) -> None:
        """Start waiting candidates while there are slots and room."""
        while True:
            used: collections.Counter[str] = collections.Counter()
            for group in self._groups.values():
                used[group.request.client] += group.slots_used
            waiting = [
                Waiting(g.key, g.request.client, g.key, g.slots_used, g.slots)
                for g in self._groups.values()
                if g.can_start
            ]
            chosen = next_waiting(waiting, self.max_sequences - used.total(), used)
            if chosen is None or not self._start(self._groups[chosen.key]):
                return

    def _start(self, group: Group) -> bool:
        """Give the group's next candidate a sequence; False if there is no room for it now."""
        candidate = group.waiting[0]
        tokens = candidate.all_tokens()
        if group.prompt_logits is None:
            group.prompt_logits = self._logits.get(group.prompt)
        # with the logits after the prompt at hand nothing needs to be computed to choose a token
        ready = group.prompt_logits is not None and not candidate.tokens
        placed = self._residency.place(tokens if ready else tokens[:-1], self._live())
        if placed is None:
            return False
        sequence, reused = placed
        others = any(g.running for g in self._groups.values())
        needed = len(tokens) - reused + (_HEADROOM if others else 1)
        if not self._residency.make_room(cells=needed) and others:
            self._residency.retire(sequence, tokens[:reused], keep=self.config.prefix_cache)
            return False
        self._starts += 1
        self._reused += reused
        candidate.sequence, candidate.computed, candidate.started = sequence, reused, self._starts
        candidate.prefilling = reused < len(group.prompt)
        if group.started is None:
            group.started = time.monotonic()
            group.cached_tokens = min(reused, len(group.prompt))
        if not candidate.pending and group.prompt_logits is not None:
            self._emitter.advance([candidate], group.prompt_logits[None])
        return True

    def _live(self) -> Iterator[tuple[int, NDArray[np.int32]]]:
        for c in self._running():
            if c.sequence is not None and c.computed:
                yield c.sequence, c.slice(0, c.computed)

    # -------------------------------------------------------------------------------- computing

    def _with_room(self, decoding: list[Candidate]) -> list[Candidate]:
        """Those of the candidates that fit one more token each; others give way, the youngest first."""
        if self._residency.make_room(cells=len(decoding)):
            return decoding
        order = iter(victims(self._views()))
        by_key = {id(c): c for c in self._running()}
        while not self._residency.make_room(cells=len(decoding)):
            key = next(order, None)
            if key is None:
                break
            self._give_way(by_key[key])
            decoding = [c for c in decoding if c.running]
        return decoding

    def _give_way(self, candidate: Candidate) -> None:
        """Take a candidate's sequence; it starts again, with what it has produced, when there is room.

        Nothing but its own request's beams in its way, it would not get further the next time.
        """
        group = candidate.group
        if all(c.group is group for c in self._running()) and (group.beam or len(group.running) == 1):
            memory = self.engine.memory
            used = memory.n_cells - memory.free_cells
            self._emitter.fail(group, OutOfCellsError(len(group.running), used, memory.n_cells))
            return
        self._vacate(candidate)

    def _vacate(self, candidate: Candidate) -> None:
        group = candidate.group
        if group.beam is None:
            self._emitter.vacate(candidate, keep=False)
            return
        for lane in group.running:
            self._emitter.vacate(lane, keep=False)
        self._intake.restart_beams(group)

    def _decode(self, candidates: Sequence[Candidate]) -> None:
        """One token of each candidate in one batch: its newest, or the next of those it has to replay.

        A replay goes the way the tokens went at first, one by one: llama.cpp rounds a prompt otherwise.
        """
        if not candidates:
            return
        batch = Batch(
            tokens=np.array([c.tokens[c.computed - len(c.group.prompt)] for c in candidates], np.int32),
            positions=np.array([c.computed for c in candidates], np.int32),
            sequences=np.array([c.sequence for c in candidates], np.int32),
            outputs=np.array([c.pending == 1 for c in candidates], np.bool_),
            draws=self._draws(candidates),
        )
        self._start_flight(Flight(batch, tuple(candidates), 1))

    def _draws(self, candidates: Sequence[Candidate]) -> tuple[Draw | None, ...] | None:
        """How an engine that can do so draws the next tokens; None if it draws none."""
        draws = tuple(
            self._emitter.draw_of(c)
            if c.pending == 1 and c.group.beam is None and self._flights.can_draw(c.group.request.sampling)
            else None
            for c in candidates
        )
        return draws if any(draw is not None for draw in draws) else None

    def _prefill(self, candidate: Candidate, start: int, end: int) -> None:
        """Tokens [start, end) of one candidate's prompt."""
        if not self._room_to_prefill(candidate, end - start):
            return
        outputs = np.zeros(end - start, np.bool_)
        outputs[-1] = end == len(candidate.group.prompt)
        batch = Batch(
            tokens=candidate.slice(start, end),
            positions=np.arange(start, end, dtype=np.int32),
            sequences=np.full(end - start, candidate.sequence, np.int32),
            outputs=outputs,
        )
        candidate.served = self._steps + 1
        self._start_flight(Flight(batch, (candidate,), end - start))

    def _room_to_prefill(self, candidate: Candidate, cells: int) -> bool:
        """Make room, from younger candidates too; if that is not enough the candidate gives way itself."""
        by_key = {id(c): c for c in self._running()}
        for key in victims(self._views(), keep=id(candidate)):
            if self._residency.make_room(cells=cells):
                return True
            if by_key[key].started > candidate.started and by_key[key].running:
                self._give_way(by_key[key])
        if self._residency.make_room(cells=cells):
            return True
        self._give_way(candidate)
        return False

    def _start_flight(self, flight: Flight) -> None:
        """Have a batch computed, and take in what has come back where no more may be under way."""
        try:
            self._flights.start(flight)
        except LlamaherdError as error:
            self._failed(flight, error)
        if self._flights.full:
            self._land()

    def _land(self) -> None:
        """Take in the oldest batch that is under way."""
        flight, result = self._flights.land()
        if isinstance(result, LlamaherdError):
            self._failed(flight, result)
            return
        aboard = flight.aboard
        self._decoded += sum(not c.prefilling for c in aboard)
        for c in aboard:
            if c.prefilling:
                self._prefilled += flight.tokens
            if c.prefilling and c.computed == len(c.group.prompt):
                prompt_logits = result[0]
                assert isinstance(prompt_logits, np.ndarray)
                c.group.prompt_logits = prompt_logits.copy()
                self._logits.put(c.group.prompt, c.group.prompt_logits)
                c.prefilling = False
        ready = [c for c in aboard if not c.pending]
        if ready:
            self._emitter.advance(ready, flight.rows_of(ready, result))

    def _failed(self, flight: Flight, error: LlamaherdError) -> None:
        """A batch came to nothing; all is as it was before it, or has failed."""
        candidates = flight.aboard
        if isinstance(error, DecodeAbortedError):
            self._replay_lost(candidates)  # somebody cancelled; whoever did not is tried again
        elif isinstance(error, WorkerError) and any(map(self._lost, self._running())):
            self.fail_all(error)  # the engine has lost every sequence
            self.drop_cache()
        else:
            self._isolate(candidates, flight.groups, error)

    def _isolate(
        self, candidates: Sequence[Candidate], groups: Sequence[Group], error: LlamaherdError
    ) -> None:
        """A batch failed: find out whose fault it is by computing each candidate alone."""
        if len(groups) == 1:
            self._emitter.fail(groups[0], error)
            return
        for candidate in candidates:
            if not candidate.running:
                continue
            if self._lost(candidate):  # again all together it might fail for ever
                self._emitter.fail(candidate.group, error)
            else:
                self._decode([candidate])

    def _lost(self, candidate: Candidate) -> bool:
        """Whether a failed decode has emptied the candidate's sequence, as it does recurrent states."""
        sequence = candidate.sequence
        return sequence is not None and self.engine.memory.length(sequence) < candidate.computed

    def _replay_lost(self, candidates: Sequence[Candidate]) -> None:
        """Have candidates start again whose sequences an aborted decode has emptied."""
        for candidate in candidates:
            if candidate.running and self._lost(candidate):
                self._vacate(candidate)

    # --------------------------------------------------------------------------------- lifetime

    def run_until_idle(self, max_steps: int = 1_000_000) -> None:
        """Step until nothing is left to do, in the caller's thread."""
        for _ in range(max_steps):
            if not self.step() and not self._inbox:
                return

    def wait(self, timeout: float | None = None) -> None:
        """Sleep until something is submitted or cancelled, or wake() is called."""
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
            self._emitter.fail(group, error)

    def close(self) -> None:
        """Refuse new requests and end the open ones with ClosedError; idempotent. Not beside step()."""
        with self._lock:
            self._closed = True
        self.fail_all(ClosedError("scheduler"))
        self.drop_cache()

    def drop_cache(self) -> None:
        """Forget all idle sequences. Not beside step()."""
        self._logits.clear()
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
