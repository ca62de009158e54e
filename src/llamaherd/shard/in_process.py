"""Stages of this process, called one after the other."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Sequence

from ..engine.protocol import FloatArray, IntArray, Row
from ..errors import DecodeAbortedError, LlamaherdError
from .stage import Stage, StageFacts
from .work import Done, StageWork, Work, perform

__all__ = ["InProcessChain"]


class InProcessChain:
    """A chain without processes: for tests, measurements, and a model that is to be seen layer by layer.

    Args:
        stages: from the first layers to the last; closed with the chain.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = tuple(stages)
        self.facts: tuple[StageFacts, ...] = tuple(stage.facts for stage in stages)
        self.depth = 1
        self._done: collections.deque[Done] = collections.deque()
        self._aborted = threading.Event()

    def send(self, work: Work) -> None:
        """Compute a step at once."""
        self._aborted.clear()
        self._done.append(self._compute(work))

    def _compute(self, work: Work) -> Done:
        batch = work.batch
        values: IntArray | FloatArray | list[Row] | None = None
        if batch is not None:
            values = batch.tokens if batch.tokens is not None else batch.embeddings
        error: LlamaherdError | None = None
        seconds = []
        for stage in self._stages:
            began = time.perf_counter()
            if self._aborted.is_set():
                error = error or DecodeAbortedError()
            inputs = values if error is None and not isinstance(values, list) else None
            try:
                values = perform(stage, StageWork.of(work, inputs))
            except LlamaherdError as failure:
                error = failure
            seconds.append(time.perf_counter() - began)
        return Done(rows=values if error is None else None, error=error, seconds=tuple(seconds))  # type: ignore[arg-type]

    def receive(self) -> Done:
        """The oldest step's result."""
        return self._done.popleft()

    def restore(self) -> None:
        """Empty all sequences."""
        self._done.clear()
        for stage in self._stages:
            stage.memory.clear()

    def rebalance(self) -> bool:
        """There is nowhere to go."""
        return False

    def abort(self) -> None:
        """Stop the forward pass in flight."""
        self._aborted.set()
        for stage in self._stages:
            stage.abort()

    def close(self) -> None:
        """Free the stages."""
        for stage in self._stages:
            stage.close()
