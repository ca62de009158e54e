"""The file of a saved cache: a header in JSON, then one engine state for each row."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import StateMismatchError
from ..files.atomic import replacing

__all__ = ["read", "write"]

_MAGIC = b"LHCACHE1"
_HEAD = struct.Struct("<8sQ")  # magic, bytes of the header


def write(path: str | PathLike[str], states: Sequence[bytes], mask: NDArray[np.bool_]) -> None:
    """Write the rows' states and the mask [rows, columns]; the file appears whole or not at all."""
    packed = np.packbits(mask, axis=1) if mask.size else np.empty((len(states), 0), np.uint8)
    header = json.dumps(
        {
            "rows": [len(s) for s in states],
            "columns": mask.shape[1],
            "mask": [r.tobytes().hex() for r in packed],
        }
    ).encode()
    with replacing(path, _HEAD.size + len(header) + sum(map(len, states))) as file:
        file.write(_HEAD.pack(_MAGIC, len(header)))
        file.write(header)
        for state in states:
            file.write(state)


def read(path: str | PathLike[str]) -> tuple[list[bytes], NDArray[np.bool_]]:
    """The states and the mask of a file that write() made. Raises StateMismatchError."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise StateMismatchError(path, f"it cannot be read: {error.strerror}") from error
    try:
        magic, size = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            raise ValueError
        header = json.loads(data[_HEAD.size : _HEAD.size + size])
        sizes, columns = [int(n) for n in header["rows"]], int(header["columns"])
        rows = [np.frombuffer(bytes.fromhex(row), np.uint8) for row in header["mask"]]
        bits = np.stack([np.unpackbits(row, count=columns) for row in rows]) if rows else np.zeros((0, 0))
        if len(rows) != len(sizes) or bits.shape[1] != columns:
            raise ValueError
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise StateMismatchError(path, "it is no saved cache of this version") from error
    start = _HEAD.size + size
    if len(data) != start + sum(sizes):
        raise StateMismatchError(path, f"it has {len(data)} bytes, its header says {start + sum(sizes)}")
    ends = np.cumsum([start, *sizes]).tolist()
    states = [data[a:b] for a, b in itertools.pairwise(ends)]
    return states, bits.astype(np.bool_)
