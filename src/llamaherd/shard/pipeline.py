"""A chain of stages as an Engine: what runs on one model runs on its shards."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from ..config import SamplingConfig
from ..engine.batches import check_batch
from ..engine.model import Model
from ..engine.picks import is_memoryless
from ..engine.protocol import Batch, FloatArray, Row, TokenSampler
from ..engine.sampling import make_sampler
from ..engine.sequences import SequenceTable
from ..engine.vocabulary import Vocabulary
from ..errors import ClosedError, ContextError, DecodeAbortedError, LlamaherdError, StageLostError
from .history import History
from .stage import StageFacts
from .work import Chain, Operation, Work

__all__ = ["Pipeline", "PipelineMemory"]

_MOST_LOSSES = 2  # of stages over one batch, until it fails
_MOST_ATTEMPTS = 5  # at one recovery


class PipelineMemory(SequenceTable):
    """The sequences of all stages, which follow what is done here with the next step."""

    def __init__(self, lock: Any, **sizes: Any) -> None:
        super().__init__(lock, **sizes)
        self._pending: list[Operation] = []
        self.closed = False

    def take_pending(self) -> tuple[Operation, ...]:
        """The operations since the last call."""
        pending, self._pending = tuple(self._pending), []
        return pending

    @property
    def n_pending(self) -> int:
        """Operations that no step has taken along yet."""
        return len(self._pending)

    def lose_all(self) -> None:
        """All sequences are empty."""
        self._pending.clear()
        for sequence in self._live:
            self._ledger.trim(sequence, 0)

    def roll_back(self, sequence: int, length: int) -> None:
        """Take back tokens that could not be computed."""
        if sequence not in self._live:
            return
        length = length if self.can_trim else 0
        self._pending.append(Operation("trim", sequence, length=length))
        if length < self.length(sequence):
            self._ledger.trim(sequence, length)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("pipeline")

    def _on_allocate(self, sequence: int) -> None:
        self._pending.append(Operation("allocate", sequence))

    def _on_release(self, sequence: int) -> None:
        self._pending.append(Operation("release", sequence))

    def _on_fork(self, source: int, target: int, length: int, have: int) -> None:
        self._pending.append(Operation("fork", target, source, length))

    def _on_trim(self, sequence: int, length: int) -> None:
        self._pending.append(Operation("trim", sequence, length=length))


class _Ticket:
    """A batch under way.

    Attributes:
        batch: the whole.
        before: length of each of its sequences before it.
        left: steps of it that have not come back.
        recoveries: stages that were lost while it was under way.
    """

    def __init__(self, batch: Batch, before: dict[int, int], left: int) -> None:
        self.batch = batch
        self.before = before
        self.left = left
        self.recoveries = 0
        self.rows: list[FloatArray | list[Row]] = []
        self.error: LlamaherdError | None = None


class _Rebalancing:
    """A wish to divide the layers anew, and what came of it."""

    done = moved = False
    error: LlamaherdError | None = None


class Pipeline:
    """An Engine over a chain of stages.

    Batches may be under way at once: submit() them, and collect() their logits in the same order. decode()
    does both. A stage that is lost is replaced while a call waits: its KV cache is computed again from the
    pieces that it was made of, and what was under way is sent again.

    Args:
        chain: its stages, which it closes with itself.
        model: the model's vocabulary (``Model.load(path, vocab_only=True)``), closed likewise.

    Attributes:
        recoveries, recovery_seconds: how often stages were replaced; how long the last time took.
        computed_tokens: in all, those of replays not counted.
        stage_seconds: float64 [stages], that each has computed.

    Raises:
        ContextError: the stages do not fit together.
    """

    def __init__(self, chain: Chain, model: Model) -> None:
        self.chain = chain
        self.model = model
        self.vocabulary: Vocabulary = model.vocabulary
        self.facts = facts = chain.facts
        self._n_vocab = model.vocabulary.n_tokens
        _check_fit(facts, self._n_vocab)
        self.n_ctx = min(f.n_ctx for f in facts)
        self.n_batch = min(f.n_batch for f in facts)
        self.n_embd = facts[0].n_embd
        self.recoveries = 0
        self.recovery_seconds = 0.0
        self.computed_tokens = 0
        self._lock = threading.RLock()
        self.memory = PipelineMemory(
            self._lock,
            n_sequences=min(f.n_seq_max for f in facts),
            n_cells=min(f.n_cells for f in facts),
            unified=facts[0].unified,
            can_trim=all(f.can_trim for f in facts),
        )
        self._history = History()  # of what has come back
        self._recovering = False
        self._rebalancing: _Rebalancing | None = None
        self._under_way: collections.deque[tuple[Work, _Ticket]] = collections.deque()
        self.stage_seconds = np.zeros(len(facts))

    @property
    def depth(self) -> int:
        """Batches that can be under way at once so that every stage works."""
        return self.chain.depth

    # ------------------------------------------------------------------------------------- decode

    def decode(self, batch: Batch) -> FloatArray:
        """Compute a batch; logits float32 [n wanted, n_vocab] in batch order. See `Engine.decode`.

        Raises also WorkerError: a stage was lost and cannot be replaced.
        """
        with self._lock:
            logits = self.collect(self.submit(dataclasses.replace(batch, draws=None)))
            assert not isinstance(logits, list)
            return logits

    def submit(self, batch: Batch) -> _Ticket:
        """Begin a batch. Raises as decode() does where nothing runs."""
        with self._lock:
            self.memory._check_open()
            self._rebalance_if_asked()
            appended = check_batch(
                batch, self.memory, n_ctx=self.n_ctx, n_vocab=self._n_vocab, n_embd=self.n_embd
            )
            before = {s: self.memory.length(s) for s in appended}
            parts = [slice(a, a + self.n_batch) for a in range(0, len(batch), self.n_batch)]
            ticket = _Ticket(batch, before, len(parts))
            for part in parts:
                self._send(Work(self.memory.take_pending(), _part(batch, part)), ticket)
            for sequence, count in appended.items():
                self.memory.appended(sequence, count)
            return ticket

    def collect(self, ticket: _Ticket) -> FloatArray | list[Row]:
        """What came of a batch that submit() has begun, once those before it are in. Raises as decode().

        Its logits, or if it has ``draws`` a row for each wanted token: what the last stage has drawn.
        """
        with self._lock:
            while ticket.left:
                self._receive()
            if ticket.error is not None:
                raise ticket.error
            parts = ticket.rows
            if len(parts) == 1:
                return parts[0]
            if ticket.batch.draws is not None:
                return [row for part in parts for row in part]
            return np.concatenate([part for part in parts if isinstance(part, np.ndarray)])

    def can_draw(self, config: SamplingConfig) -> bool:
        """Whether the last stage draws tokens with these settings."""
        return is_memoryless(config)

    def _send(self, work: Work, ticket: _Ticket) -> None:
        self._under_way.append((work, ticket))
        try:
            self.chain.send(work)
        except StageLostError as error:
            self._recover(error)

    def _receive(self) -> None:
        """Take the oldest step's result in."""
        try:
            done = self.chain.receive()
        except StageLostError as error:
            self._recover(error)
            return
        if isinstance(done.error, StageLostError):
            self._recover(done.error)
            return
        work, ticket = self._under_way.popleft()
        self._history.apply(work.operations)
        ticket.left -= 1
        if done.error is not None:
            self._fail(ticket, done.error)
        elif work.batch is not None:
            assert done.rows is not None
            self._history.append(work.batch)
            self.computed_tokens += len(work.batch)
            self.stage_seconds += done.seconds
            ticket.rows.append(done.rows)

    # --------------------------------------------------------------------------------- rebalancing

    def rebalance(self) -> bool:
        """Divide the layers anew among the machines that there are now; whether that changed anything.

        From any thread. Requests wait meanwhile: stages that move are loaded where they go, and the caches
        are computed again.

        Raises:
            ClosedError: after close().
            CapacityError: the machines have not enough room for the whole; nothing was changed.
            WorkerError: a stage could not be started; the next batch tries again.
        """
        asked = self._rebalancing = _Rebalancing()
        with self._lock:  # whoever computes without a pause takes it up in submit()
            if not asked.done:
                self._rebalance_if_asked()
        if asked.error is not None:
            raise asked.error
        return asked.moved

    def _rebalance_if_asked(self) -> None:
        asked, self._rebalancing = self._rebalancing, None
        if asked is None:
            return
        try:
            asked.moved = self._rebalance()
        except LlamaherdError as error:
            asked.error = error
        finally:
            asked.done = True

    def _rebalance(self) -> bool:
        self.memory._check_open()
        while self._under_way:
            self._receive()
        if not self.chain.rebalance():
            return False
        recoveries = self.recoveries
        error = StageLostError(-1, "the layers were divided anew")
        self._recover(error)
        if self.recoveries == recoveries:
            raise error
        facts = self.facts = self.chain.facts
        _check_fit(facts, self._n_vocab)
        self.stage_seconds = np.zeros(len(facts))
        return True

    # ----------------------------------------------------------------------------------- recovery

    def _recover(self, error: StageLostError) -> None:
        """Replace what was lost, and compute again what it held and what is under way."""
        began, self._recovering = time.monotonic(), True
        try:
            self._recover_from(error, began)
        finally:
            self._recovering = False

    def _recover_from(self, error: StageLostError, began: float) -> None:
        for _ in range(_MOST_ATTEMPTS):
            self._drop_culprits(error)
            try:
                self.chain.restore()
                self.recoveries += 1
                self._replay()
                for work, _ in self._under_way:
                    self.chain.send(work)
                self.recovery_seconds = time.monotonic() - began
                return
            except StageLostError as again:
                error = again
            except LlamaherdError as fatal:
                self._give_up(fatal)
                return
        self._give_up(error)

    def _drop_culprits(self, error: StageLostError) -> None:
        """Fail batches over which stages were lost again and again; they are not computed once more."""
        tickets = dict.fromkeys(ticket for _, ticket in self._under_way)
        for ticket in tickets:
            ticket.recoveries += 1
        culprits = {t for t in tickets if t.recoveries > _MOST_LOSSES}
        for ticket in culprits:
            self._fail(ticket, error)
        # what their steps did to the sequences remains to be done
        self._under_way = collections.deque(
            (Work(work.operations, None) if ticket in culprits else work, ticket)
            for work, ticket in self._under_way
        )

    def _fail(self, ticket: _Ticket, error: LlamaherdError) -> None:
        if ticket.error is None:
            ticket.error = error
            for sequence, length in ticket.before.items():
                self.memory.roll_back(sequence, length)

    def _replay(self) -> None:
        waiting = 0
        for work in self._history.replay():
            self.chain.send(work)
            waiting += 1
            if waiting > self.depth:
                self._replayed()
                waiting -= 1
        for _ in range(waiting):
            self._replayed()

    def _replayed(self) -> None:
        done = self.chain.receive()
        if isinstance(done.error, DecodeAbortedError):  # somebody cancelled a request: begin again
            raise StageLostError(-1, "the replay was aborted")
        if done.error is not None:
            raise done.error

    def _give_up(self, error: LlamaherdError) -> None:
        """Fail what is under way; all sequences are empty from now on."""
        while self._under_way:
            _, ticket = self._under_way.popleft()
            ticket.left = 0
            ticket.error = ticket.error or error
        self.memory.lose_all()
        self._history = History()
        self._history.apply([Operation("allocate", s) for s in sorted(self.memory.live)])

    # ----------------------------------------------------------------------------------- sampling

    def make_sampler(self, config: SamplingConfig, prompt: Sequence[int] = ()) -> TokenSampler:
        """A sampler for one candidate whose text begins with ``prompt``. Raises as Context.make_sampler()."""
        return make_sampler(self.model, config, self.n_ctx, prompt)

    # ----------------------------------------------------------------------------------- lifetime

    def abort(self) -> None:
        """Stop what is under way, as soon as may be; from any thread."""
        if not self._recovering:  # a replay is nobody's request
            self.chain.abort()

    def close(self) -> None:
        """Free the stages and the vocabulary; idempotent."""
        self.chain.abort()
        with self._lock:
            self.memory.closed = True
            self.chain.close()
            self.model.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _part(batch: Batch, rows: slice) -> Batch:
    """Some rows of a batch."""
    return Batch(
        tokens=None if batch.tokens is None else batch.tokens[rows],
        positions=batch.positions[rows],
        sequences=batch.sequences[rows],
        outputs=batch.outputs[rows],
        embeddings=None if batch.embeddings is None else batch.embeddings[rows],
        draws=None if batch.draws is None else batch.draws[rows],
    )


def _check_fit(facts: Sequence[StageFacts], n_vocab: int) -> None:
    """Stages follow one another, from the first layer to the last."""
    at = 0
    for fact in facts:
        if fact.start != at or fact.layers != facts[0].layers:
            raise ContextError(
                f"a stage holds layers [{fact.start}, {fact.end}) of {fact.layers}, where layer {at} of "
                f"{facts[0].layers} comes next"
            )
        if fact.n_embd != facts[0].n_embd or fact.unified != facts[0].unified:
            raise ContextError(f"the stages of layers 0 and {fact.start} differ in their model or settings")
        at = fact.end
    if at != facts[0].layers:
        raise ContextError(f"the stages end at layer {at} of {facts[0].layers}")
    if facts[-1].n_vocab != n_vocab:
        raise ContextError(f"the last stage has {facts[-1].n_vocab} tokens, the vocabulary {n_vocab}")
