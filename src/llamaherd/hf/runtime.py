"""One loaded model and its KV cache, shared by all the caches and threads that use it."""

from __future__ import annotations

import collections
import gc
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..engine.context import Context
from ..engine.model import Model
from ..errors import OutOfCellsError, OutOfSequencesError

if TYPE_CHECKING:
    from .cache import LlamaCppCache

__all__ = ["Rows", "Runtime"]

_SEQUENCES = 64  # a search over beams takes one for each; an idle one costs a row of logits
_RECURRENT_SEQUENCES = 16  # each has a state of its own
_BATCH = 512  # llama.cpp keeps logits for a whole batch: more would be memory without speed


class Rows:
    """The sequence ids of one cache. They go back to the runtime when the cache is collected."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.ids: list[int] = []

    def abandon(self) -> None:
        """Give the ids back; safe in a finalizer, which may run inside any llama.cpp call."""
        self.runtime.returned.extend(self.ids)
        self.ids = []


class Runtime:
    """A model, its context, and who uses which sequences.

    Everything that reads or changes sequences holds ``lock``.

    Args:
        model: it is closed with the runtime.
        params: llama.cpp's context parameters. Other defaults than the engine's: ``n_seq_max`` is 64 (16 for
            recurrent models), ``n_batch`` 512.
        layer_outputs: make the hidden states of all layers available (see use_layer_outputs()).
    """

    def __init__(self, model: Model, params: dict[str, Any], *, layer_outputs: bool = False) -> None:
        self.model = model
        self.lock = threading.RLock()
        self.params = _defaults(model, params) | params
        self.layer_outputs = layer_outputs
        self.context = Context(model, layer_outputs=layer_outputs, **self.params)
        self.returned: collections.deque[int] = collections.deque()
        self._caches: weakref.WeakSet[LlamaCppCache] = weakref.WeakSet()

    def register(self, cache: LlamaCppCache) -> None:
        """Note a cache, to say what uses the sequences when they run out."""
        self._caches.add(cache)

    def collect(self) -> None:
        """Release the sequences of caches that were garbage-collected."""
        memory = self.context.memory
        while self.returned:
            memory.release(self.returned.popleft())

    def allocate(self, n: int) -> list[int]:
        """``n`` empty sequences. Raises OutOfSequencesError naming what uses the others."""
        self.require(n)
        return [self.context.memory.allocate() for _ in range(n)]

    def fork(self, sequence: int) -> int:
        """A copy of a sequence that shares its cells."""
        self.require(1)
        try:
            return self.context.memory.fork(sequence)
        except OutOfCellsError as error:
            raise self.explain(error) from error

    def require(self, n: int) -> None:
        """See that ``n`` sequences are free, after a garbage collection if need be."""
        memory = self.context.memory
        self.collect()
        if memory.free_sequences < n:
            gc.collect()  # caches in reference cycles
            self.collect()
        if memory.free_sequences < n:
            raise OutOfSequencesError(n, memory.free_sequences, memory.n_sequences, self.usage())

    def explain(self, error: OutOfCellsError) -> OutOfCellsError:
        """The same error, with what uses the cells."""
        memory = self.context.memory
        return OutOfCellsError(error.wanted, memory.used_cells, memory.n_cells, self.usage())

    def usage(self) -> str:
        """What holds sequences, in words."""
        found = sorted(
            ((cache.batch_size, cache.get_seq_length()) for cache in self._caches if cache.is_initialized),
            reverse=True,
        )
        shown = [f"a cache of {rows} rows x {length} tokens" for rows, length in found[:6]]
        if len(found) > 6:
            shown.append(f"{len(found) - 6} more caches")
        return ", ".join(shown) or "no cache"

    def use_layer_outputs(self) -> None:
        """Make the context one that can show hidden states of all layers; live caches move over.

        Each node of llama.cpp's graph then costs a call into Python, so it is done when it is asked for.
        """
        with self.lock:
            if self.layer_outputs:
                return
            self.collect()
            before = self.context
            saved = [
                (cache, [before.save_sequence(row) for row in cache.rows.ids])
                for cache in list(self._caches)
                if cache.is_initialized
            ]
            after = Context(self.model, layer_outputs=True, **self.params)
            try:
                if before.lora_scales:
                    after.scale_loras(before.lora_scales)
                moved = [(cache, [after.restore_sequence(row) for row in rows]) for cache, rows in saved]
            except BaseException:
                after.close()
                raise
            for cache, ids in moved:
                cache.rows.ids[:] = ids
            self.context, self.layer_outputs = after, True
            before.close()

    def scale_loras(self, scales: Sequence[float]) -> None:
        """Scale the model's adapters."""
        with self.lock:
            self.context.scale_loras(scales)

    def close(self) -> None:
        """Free the model and its context; idempotent."""
        self.model.close()


def _defaults(model: Model, params: dict[str, Any]) -> dict[str, Any]:
    sequences = _RECURRENT_SEQUENCES if model.is_recurrent else _SEQUENCES
    defaults: dict[str, Any] = {"n_seq_max": sequences}
    n_ctx = params.get("n_ctx")
    if isinstance(n_ctx, int) and 0 < n_ctx < sequences:
        defaults["n_seq_max"] = n_ctx
    wanted = params.get("n_seq_max", defaults["n_seq_max"])
    defaults["n_batch"] = max(_BATCH, wanted if isinstance(wanted, int) else 0)
    return defaults
