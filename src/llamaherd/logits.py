"""Log-probabilities from logits, many rows at once, in numpy."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from .errors import LogitsError

__all__ = ["check_finite", "exponentials", "log_normalizers", "log_softmax", "top_k"]

Floats = NDArray[np.float32]
_BLOCK = 256


class _Scratch(threading.local):
    """A row to compute in, one a thread: a fresh array of a vocabulary's size costs its page faults."""

    row: Floats = np.empty(0, np.float32)


_scratch = _Scratch()


def exponentials(row: Floats, temperature: float = 1.0, peak: float | None = None) -> Floats:
    """exp((row - max(row)) / temperature): valid until this thread's next call of this module.

    ``peak`` is max(row) where the caller knows it.
    """
    if len(_scratch.row) < row.size:
        _scratch.row = np.empty(row.size, np.float32)
    out = _scratch.row[: row.size]
    np.subtract(row, row.max() if peak is None else peak, out=out)
    if temperature != 1.0:
        np.multiply(out, np.float32(1 / temperature), out=out)
    np.exp(out, out=out)
    return out


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
    for i, row in enumerate(rows):
        peak = row.max()
        result[i] = peak + np.log(exponentials(row, peak=peak).sum()) if np.isfinite(peak) else np.nan
    return result


def log_softmax(rows: Floats) -> Floats:
    """Natural log-probabilities of each row of [n, n_vocab]."""
    return rows - log_normalizers(rows)[:, None]


def top_k(row: Floats, k: int) -> NDArray[np.intp]:
    """Indices of the k greatest values, greatest first; among equals the lower index first."""
    k = min(k, row.size)
    if k <= 0:
        return np.empty(0, np.intp)
    # everything at or above the k-th value (or a bit below it), so that ties are decided by index
    chosen = np.flatnonzero(row >= _border(row, k)) if k < row.size else np.arange(row.size)
    order = np.argsort(-row[chosen], kind="stable")
    return chosen[order[:k]]


def _border(row: Floats, k: int) -> float:
    """A value that at least k values reach: of blocks of the row, the k-th greatest maximum."""
    blocks = row.size // _BLOCK
    if blocks < 2 * k:
        return float(np.partition(row, row.size - k)[row.size - k])
    peaks = row[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
    return float(np.partition(peaks, blocks - k)[blocks - k])
