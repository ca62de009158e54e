"""Log-probabilities from logits, many rows at once, in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .errors import LogitsError

__all__ = ["check_finite", "log_normalizers", "log_softmax", "top_k"]

Floats = NDArray[np.float32]


def check_finite(row: Floats) -> None:
    """Refuse logits [n_vocab] from which nothing can be sampled.

    Single tokens at -inf are fine (a model may forbid them).

    Raises:
        LogitsError: NaN, +inf, or no finite value at all.
    """
    peak = float(row.max())  # NaN anywhere makes the maximum NaN
    if np.isnan(peak):
        raise LogitsError(f"NaN ({int(np.isnan(row).sum())} of {row.size} values)")
    if peak == np.inf:
        raise LogitsError("+inf")
    if peak == -np.inf:
        raise LogitsError("no finite value")


def log_normalizers(rows: Floats) -> Floats:
    """log(sum(exp(row))) of each row of [n, n_vocab], float32 [n]; NaN where a row holds NaN or +inf.

    Row by row: one row and its exponentials stay in the cache, a whole block would not.
    """
    result = np.empty(len(rows), np.float32)
    scratch = np.empty(rows.shape[-1], np.float32)
    for i, row in enumerate(rows):
        peak = row.max()
        if not np.isfinite(peak):
            result[i] = np.nan
            continue
        np.subtract(row, peak, out=scratch)
        np.exp(scratch, out=scratch)
        result[i] = peak + np.log(scratch.sum())
    return result


def log_softmax(rows: Floats) -> Floats:
    """Natural log-probabilities of each row of [n, n_vocab]."""
    return rows - log_normalizers(rows)[:, None]


def top_k(row: Floats, k: int) -> NDArray[np.intp]:
    """Indices of the k greatest values, greatest first; among equals the lower index first."""
    k = min(k, row.size)
    if k <= 0:
        return np.empty(0, np.intp)
    if k < row.size:
        # everything at or above the k-th value, so that ties at the border are decided by index
        border = np.partition(row, row.size - k)[row.size - k]
        chosen = np.flatnonzero(row >= border)
    else:
        chosen = np.arange(row.size)
    order = np.argsort(-row[chosen], kind="stable")
    return chosen[order[:k]]
