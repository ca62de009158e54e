"""Write large arrays piece by piece, as fast as the page cache gives them."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, BinaryIO

import numpy as np

from llamaherd.files.model_file import Bytes

__all__ = ["write_pieces"]

_PIECE = 8 << 20
_MADV_POPULATE_READ = 22  # Linux 5.14; Python has no name for it yet


def write_pieces(file: BinaryIO, raw: Bytes) -> Iterator[int]:
    """Write ``raw`` (flat, contiguous) in pieces of at most 8 MiB; yields the bytes of each."""
    view = np.ascontiguousarray(raw).data
    for start in range(0, raw.nbytes, _PIECE):
        piece = view[start : start + _PIECE]
        _prefault(raw, start, piece.nbytes)
        file.write(piece)
        yield piece.nbytes


def _prefault(raw: Bytes, start: int, size: int) -> None:
    """Have the kernel map a piece of a mapped file in one go: page by page takes as long as the copy."""
    base: Any = raw
    while isinstance(base, np.ndarray):
        whole, base = base, base.base
    mapping = base.obj if isinstance(base, memoryview) else None
    if isinstance(mapping, mmap.mmap):
        offset = raw.ctypes.data - whole.ctypes.data + start
        aligned = offset - offset % mmap.PAGESIZE
        with suppress(OSError, ValueError):  # an older kernel: the pages come one by one
            mapping.madvise(_MADV_POPULATE_READ, aligned, size + offset - aligned)
