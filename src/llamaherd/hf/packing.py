"""From padded tensors to the engine's flat batches: masked columns are left out, so padding costs nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ..engine.protocol import Batch
from ..errors import RequestError, UnsupportedError
from .cache import LlamaCppCache

__all__ = ["Columns", "kept_columns", "new_mask", "pack", "same_rows"]

Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Columns:
    """Some columns of a forward's input.

    Attributes:
        tokens: int32 [batch, columns], or None.
        embeddings: float32 [batch, columns, hidden], or None.
        mask: bool [batch, columns], which are tokens and not padding.
    """

    tokens: NDArray[np.int32] | None
    embeddings: NDArray[np.float32] | None
    mask: Bools

    @property
    def shape(self) -> tuple[int, int]:
        """(batch, columns)."""
        rows, columns = self.mask.shape
        return rows, columns

    def part(self, columns: slice) -> Columns:
        """A stretch of the columns."""
        return Columns(
            None if self.tokens is None else self.tokens[:, columns],
            None if self.embeddings is None else self.embeddings[:, columns],
            self.mask[:, columns],
        )


def new_mask(attention_mask: torch.Tensor | None, cache: LlamaCppCache, rows: int, columns: int) -> Bools:
    """Which of the new columns are tokens: bool [rows, columns].

    Args:
        attention_mask: [rows, past + columns] or [rows, columns], nonzero at tokens; None: all are.
        cache: where the past columns are. Where the mask now leaves out a row's last tokens (the padding
            that generate() put behind a finished row), they are taken out of llama.cpp.

    Raises:
        UnsupportedError: it is no 2-D mask.
        RequestError: it has another shape, or another opinion of what is cached.
    """
    if attention_mask is None:
        return np.ones((rows, columns), np.bool_)
    if attention_mask.ndim != 2:
        raise UnsupportedError(
            f"attention_mask has {attention_mask.ndim} dimensions; llama.cpp masks causally by itself, give "
            "the 2-D mask of tokens and padding"
        )
    mask = attention_mask.detach().to("cpu", torch.bool).numpy()
    before = cache.get_seq_length()
    if mask.shape == (rows, before + columns):
        if before:
            cache.mask_again(mask[:, :before])
        return mask[:, before:]
    if mask.shape == (rows, columns):
        return mask
    raise RequestError(
        f"attention_mask has the shape {mask.shape}; {(rows, before + columns)} or {(rows, columns)} fits "
        f"{columns} new columns after {before} cached ones"
    )


def kept_columns(logits_to_keep: int | torch.Tensor, columns: int) -> Bools:
    """Which columns' logits are wanted (transformers' logits_to_keep: 0 is all, n the last n, or indices)."""
    keep = np.zeros(columns, np.bool_)
    if isinstance(logits_to_keep, torch.Tensor):
        keep[logits_to_keep.cpu().numpy()] = True
    else:
        keep[-logits_to_keep if logits_to_keep else 0 :] = True
    return keep


def same_rows(columns: Columns) -> list[int]:
    """For each row the first row that is equal to it, itself if none is (expanded beams are equal)."""
    rows = columns.shape[0]
    if rows == 1:
        return [0]
    seen: dict[bytes, int] = {}
    return [seen.setdefault(_identity(columns, i), i) for i in range(rows)]


def _identity(columns: Columns, row: int) -> bytes:
    given = columns.tokens if columns.tokens is not None else columns.embeddings
    assert given is not None
    mask = columns.mask[row]
    return bytes(mask.tobytes() + given[row][mask].tobytes())


def pack(columns: Columns, cache: LlamaCppCache, outputs: Bools) -> tuple[Batch, NDArray[np.intp]]:
    """The batch of the columns' tokens, and the flat index (row * columns + column) of each of them.

    Rows without a sequence (they equal another) and padding are left out.

    Args:
        outputs: bool [columns], whose outputs are wanted.
    """
    ids = np.asarray(cache.rows.ids, np.int32)
    mask = columns.mask & (ids >= 0)[:, None]
    row, column = np.nonzero(mask)  # row by row, each in order
    starts = np.array([cache.length(i) if ids[i] >= 0 else 0 for i in range(len(ids))], np.int32)
    positions = (starts[:, None] + np.cumsum(mask, axis=1, dtype=np.int32) - 1)[row, column]
    batch = Batch(
        tokens=None if columns.tokens is None else columns.tokens[row, column],
        positions=positions.astype(np.int32),
        sequences=ids[row],
        outputs=outputs[column],
        embeddings=None if columns.embeddings is None else columns.embeddings[row, column],
    )
    return batch, row * columns.shape[1] + column
