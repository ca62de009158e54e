"""Importance matrices: how much each input of a weight mattered, for quantising with care.

Reads both formats that llama.cpp's imatrix tool wrote: GGUF (``NAME.in_sum2``, ``NAME.counts``) and the older
.dat (``common/imatrix-loader.cpp``).
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from llamaherd.errors import MalformedFileError
from llamaherd.files.gguf import MAGIC, read_part
from llamaherd.files.mapped import Cursor, MappedFile

__all__ = ["read_imatrix"]

Floats = npt.NDArray[np.float32]


def read_imatrix(path: str | os.PathLike[str]) -> dict[str, Floats]:
    """The mean squared input of each weight's columns, by the weight's GGUF name.

    Experts' columns follow one another. Raises ModelNotFoundError, MalformedFileError.
    """
    file = MappedFile(path)
    found = _read_gguf(file) if file.data[:4].tobytes() == MAGIC else _read_dat(file.cursor())
    if not found:
        raise MalformedFileError(path, "there is no importance matrix in this file")
    for name, values in found.items():
        if not np.isfinite(values).all() or (values < 0).any():
            raise MalformedFileError(path, f"the importances of {name!r} are negative or not finite")
    return found


def _read_gguf(file: MappedFile) -> dict[str, Floats]:
    tensors = read_part(file).tensors
    out: dict[str, Floats] = {}
    for name, sums in tensors.items():
        base, _, suffix = name.rpartition(".")
        if suffix != "in_sum2":
            continue
        counts = tensors.get(f"{base}.counts")
        if counts is None or sums.type.number != 0 or counts.type.number != 0:
            raise MalformedFileError(file.path, f"{base!r} has no counts, or they are not f32")
        n = counts.n_elements
        if n == 0 or sums.n_elements % n:
            raise MalformedFileError(file.path, f"{base!r} has {sums.n_elements} sums for {n} counts")
        total = sums.dequantize().reshape(n, -1)
        seen = counts.dequantize().reshape(n, 1)
        # an expert that was never chosen: all its inputs count the same
        out[base] = np.where(seen > 0, total / np.maximum(seen, 1), np.float32(1)).astype("<f4").reshape(-1)
    return out


def _read_dat(cursor: Cursor) -> dict[str, Floats]:
    count = cursor.i32()
    if not 0 <= count <= cursor.size // 12:
        raise cursor.malformed(f"{count} importance matrices do not fit into this file; is it one?", 0)
    out: dict[str, Floats] = {}
    for _ in range(count):
        name = cursor.take(cursor.i32(), "a weight's name").decode("utf-8", "replace")
        calls, n = cursor.i32(), cursor.i32()
        start = cursor.skip(4 * n, f"{n} importances of {name!r}")
        values = cursor.data[start : cursor.at].view("<f4")
        out[name] = (values / calls if calls > 0 else values).astype("<f4")
    return out
