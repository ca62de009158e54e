"""A stage: some consecutive layers of a model, hidden states in, hidden states or logits out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine.context import Context
from ..engine.memory import Memory
from ..engine.model import Model
from ..engine.protocol import Batch, Draw, FloatArray, IntArray, Row
from ..errors import InvalidParameterError, PositionError, RequestError
from .draws import Drawer
from .slices import SliceStore, read_range

__all__ = ["Stage", "StageFacts"]


@dataclass(frozen=True)
class StageFacts:
    """What the other side of a pipeline must know of a stage.

    Attributes:
        start, end, layers: it computes layers [start, end) of ``layers``.
        n_ctx, n_batch, n_ubatch, n_seq_max, n_cells: of its context.
        unified, can_trim: of its KV cache.
        n_embd: width of the hidden states.
        n_vocab: tokens of the vocabulary; of a middle stage nothing that matters.
        size: bytes of its weights.
    """

    start: int
    end: int
    layers: int
    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    n_cells: int
    unified: bool
    can_trim: bool
    n_embd: int
    n_vocab: int
    size: int


class Stage:
    """Layers [start, end) of a model with their KV cache. Make one with :meth:`load`.

    A chain of stages computes, bit for bit, what the whole model does with the same batches and the same
    context parameters.

    Attributes:
        memory: its sequences: ``allocate()``, ``fork()``, ``trim()``, ``release()``.
    """

    def __init__(self, model: Model, start: int, end: int, layers: int, **context_params: Any) -> None:
        self.model = model
        self.start, self.end, self.layers = start, end, layers
        self.first, self.last = start == 0, end == layers
        self._context = Context(model, layer_outputs=not self.last, **context_params)
        self._drawer = Drawer(model, self._context.n_ctx)
        self.memory: Memory = self._context.memory

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        start: int | None = None,
        end: int | None = None,
        *,
        store: SliceStore | None = None,
        model_params: dict[str, Any] | None = None,
        **context_params: Any,
    ) -> Stage:
        """Load layers [start, end) and make their context.

        Args:
            path: a whole model, which is cut (once: slices are kept, see `SliceStore`), or a slice that
                ``llamaherd slice`` has written, which states its own range.
            start, end: the range; needed for a whole model.
            store: where slices are kept.
            model_params: llama.cpp's own model parameters by their names.
            context_params: its context parameters by their names. All stages of a chain take the same.

        Raises:
            ModelNotFoundError, FileError: no such file, or none that can be cut there.
            InvalidParameterError: the range is not one of the model's, or not the slice's.
            ModelLoadError, ContextError: llama.cpp refused.
        """
        own = read_range(path)
        if own is None:
            if start is None or end is None:
                raise InvalidParameterError(
                    "start, end", (start, end), "the layers [start, end) of the whole"
                )
            path, layers = (store or SliceStore()).slice(path, start, end)
        elif (start, end) in ((None, None), own[:2]):
            start, end, layers = own
        else:
            raise InvalidParameterError("start, end", (start, end), f"{own[:2]}, which the file holds")
        model = Model.load(path, **(model_params or {}))
        try:
            return cls(model, start, end, layers, **context_params)
        except BaseException:
            model.close()
            raise

    @property
    def facts(self) -> StageFacts:
        """Its sizes, as llama.cpp settled them."""
        context, memory = self._context, self.memory
        return StageFacts(
            start=self.start,
            end=self.end,
            layers=self.layers,
            n_ctx=context.n_ctx,
            n_batch=context.n_batch,
            n_ubatch=context.n_ubatch,
            n_seq_max=context.n_seq_max,
            n_cells=memory.n_cells,
            unified=memory.unified,
            can_trim=memory.can_trim,
            n_embd=self.model.n_embd,
            n_vocab=self.model.vocabulary.n_tokens,
            size=self.model.size,
        )

    def forward(
        self,
        inputs: IntArray | FloatArray,
        positions: IntArray,
        sequences: IntArray,
        outputs: NDArray[np.bool_] | None = None,
    ) -> FloatArray:
        """Compute the stage's layers for a batch, which continues its sequences.

        Args:
            inputs: for the first stage int32 [n], token ids; for the others float32 [n, n_embd], what the
                stage before has put out.
            positions: int32 [n].
            sequences: int32 [n], ids that ``memory`` has handed out.
            outputs: bool [n], whose logits the last stage gives; all, if None. Other stages give all rows.

        Returns:
            Of the last stage the logits, float32 [n outputs, n_vocab], before any sampling; of the others
            the hidden states after layer ``end - 1``, float32 [n, n_embd]. In batch order, and yours.

        Raises:
            RequestError, TokenError, PositionError, SequenceError, OutOfCellsError: the batch is not valid;
                nothing ran.
            DecodeAbortedError: abort() was called.
            DecodeError: llama.cpp failed; the sequences are as before.
        """
        given: NDArray[Any] = np.asarray(inputs)
        positions, sequences = _int32("positions", positions), _int32("sequences", sequences)
        n = len(positions)
        if self.first != (given.ndim == 1):
            kind = "token ids [n]" if self.first else "hidden states [n, n_embd]"
            raise RequestError(f"the stage of layers [{self.start}, {self.end}) takes {kind}")
        if not self.first and given.dtype.kind != "f":
            raise RequestError(f"hidden states are floats, not {given.dtype}")
        if outputs is None:
            outputs = np.ones(n, np.bool_)
        elif np.shape(outputs) != (n,):
            raise RequestError(f"outputs has shape {np.shape(outputs)}, not ({n},), one for each position")
        elif not self.last:
            outputs = np.ones(n, np.bool_)
        batch = Batch(
            tokens=_int32("inputs", given) if self.first else None,
            positions=positions,
            sequences=sequences,
            outputs=np.asarray(outputs, np.bool_),
            embeddings=None if self.first else np.asarray(given, np.float32),
        )
        if self.last:
            logits: FloatArray = self._context.decode(batch).copy()
            return logits
        layer = self.end - self.start - 1
        hidden: FloatArray = self._context.run(batch, logits=False, layers=[layer]).layers[layer].copy()
        return hidden

    def draw(self, logits: FloatArray, draws: Sequence[Draw | None]) -> list[Row]:
        """Draw tokens where the logits are, so that these need not travel.

        Args:
            logits: float32 [n, n_vocab], of forward() of the last stage.
            draws: [n]; None leaves a row as it is. Their settings need no memory of the text
                (`engine.picks.is_memoryless`).

        Returns:
            For each row its logits, or a Pick, or the error that a draw came to (such as LogitsError).

        Raises RequestError: the shapes do not fit.
        """
        shape = (len(draws), self.model.vocabulary.n_tokens)
        if np.shape(logits) != shape:
            raise RequestError(f"logits have shape {np.shape(logits)}, not {shape}, a row for each draw")
        return self._drawer.draw(logits, draws)

    def trim(self, sequence: int, length: int) -> None:
        """Keep at most ``length`` tokens; a state that cannot be cut is emptied."""
        if self.memory.length(sequence) > length:
            try:
                self.memory.trim(sequence, length)
            except PositionError:
                self.memory.trim(sequence, 0)

    def abort(self) -> None:
        """Stop the forward pass in flight, if there is one; from any thread."""
        self._context.abort()

    def close(self) -> None:
        """Free the weights and the cache; idempotent."""
        self._drawer.close()
        self.model.close()

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _int32(name: str, values: NDArray[Any]) -> IntArray:
    """Whole numbers as llama.cpp takes them. Raises RequestError."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise RequestError(f"{name} are whole numbers [n], not {array.dtype} of shape {array.shape}")
    if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise RequestError(f"{name} go from {array.min()} to {array.max()}, which is not within 32 bits")
    return array.astype(np.int32)
