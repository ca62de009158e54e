"""What a decode put out, and how the parts of a split one become whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..errors import RequestError
from .protocol import Batch, FloatArray

__all__ = ["Outputs", "Part", "join", "target_rows"]


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a decode put out; rows are the batch's wanted tokens, in batch order.

    Attributes:
        logits: float32 [n_outputs, n_vocab].
        hidden: float32 [n_outputs, n_embd], the last hidden states after the final norm.
        layers: for each layer asked for, float32 [n_outputs, n_embd]: the hidden states after it.
    """

    logits: FloatArray | None = None
    hidden: FloatArray | None = None
    layers: dict[int, FloatArray] = field(default_factory=dict)


Part = tuple[NDArray[np.intp], FloatArray | None, FloatArray | None, dict[int, FloatArray]]


def target_rows(
    batch: Batch, into: tuple[FloatArray, NDArray[np.intp]], n_vocab: int
) -> tuple[FloatArray, NDArray[np.intp]]:
    """The target, and for each token of the batch (not only the wanted ones) its row there."""
    array, rows = into
    n = int(batch.outputs.sum())
    if array.dtype != np.float32 or array.ndim != 2 or array.shape[1] != n_vocab or len(rows) != n:
        raise RequestError(
            f"into takes a float32 array [rows, {n_vocab}] and {n} row numbers, not {array.dtype} "
            f"{array.shape} and {len(rows)}"
        )
    if n and not 0 <= int(rows.min()) <= int(rows.max()) < len(array):
        raise RequestError(f"into's row numbers are in [0, {len(array)})")
    places = np.zeros(len(batch), np.intp)
    places[batch.outputs] = rows
    return array, places


def join(
    batch: Batch,
    parts: list[Part],
    logits: bool,
    hidden: bool,
    layers: Sequence[int],
    n_vocab: int,
    n_embd: int,
) -> Outputs:
    """The rows of all parts, in batch order."""
    order = np.argsort(np.concatenate([index for index, *_ in parts]), kind="stable")

    def rows(arrays: list[FloatArray | None], width: int) -> FloatArray:
        present = [a for a in arrays if a is not None]
        if not present:
            return np.empty((0, width), np.float32)
        if len(parts) == 1:
            return present[0]
        return np.concatenate(present)[order]

    return Outputs(
        logits=rows([p[1] for p in parts], n_vocab) if logits else None,
        hidden=rows([p[2] for p in parts], n_embd) if hidden else None,
        layers={i: rows([p[3].get(i) for p in parts], n_embd) for i in layers},
    )
