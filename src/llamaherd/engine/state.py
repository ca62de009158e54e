"""A saved sequence: a versioned, checksummed envelope around llama.cpp's own state bytes."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import StateMismatchError
from ..files.atomic import replacing

__all__ = ["SavedSequence", "pack", "read", "saved_tokens", "unpack", "write"]

_MAGIC = b"LHSEQ1\r\n"
_HEAD = struct.Struct("<8sIQI")  # magic, header bytes, payload bytes, CRC-32 of header and payload
_MEMORY = "saved sequence"


@dataclass(frozen=True)
class SavedSequence:
    """An unpacked state: llama.cpp's bytes, how many tokens they hold, and which, if they were given."""

    payload: bytes
    length: int
    tokens: tuple[int, ...]


def pack(payload: bytes, fingerprint: Mapping[str, Any], length: int, tokens: Sequence[int]) -> bytes:
    """The envelope around a payload; ``fingerprint`` must be equal when it is unpacked."""
    header = json.dumps({"for": fingerprint, "length": length, "tokens": [int(t) for t in tokens]}).encode()
    checksum = zlib.crc32(payload, zlib.crc32(header))
    return _HEAD.pack(_MAGIC, len(header), len(payload), checksum) + header + payload


def unpack(data: bytes, fingerprint: Mapping[str, Any], path: str = _MEMORY) -> SavedSequence:
    """Check an envelope and open it. Raises StateMismatchError."""
    header, payload = _open(data, path)
    saved, wanted = header["for"], json.loads(json.dumps(fingerprint))
    for key, value in wanted.items():
        if saved.get(key) != value:
            raise StateMismatchError(
                path, f"it was saved with {key} = {saved.get(key)!r}, this context has {value!r}"
            )
    return SavedSequence(payload, int(header["length"]), tuple(header["tokens"]))


def saved_tokens(data: bytes) -> tuple[int, ...]:
    """The tokens that were saved beside a state. Raises StateMismatchError."""
    return tuple(_open(data, _MEMORY)[0]["tokens"])


def _open(data: bytes, path: str) -> tuple[dict[str, Any], bytes]:
    if len(data) < _HEAD.size or data[:8] != _MAGIC:
        raise StateMismatchError(path, "it is no saved sequence of this version")
    _, header_size, payload_size, checksum = _HEAD.unpack_from(data)
    if len(data) != _HEAD.size + header_size + payload_size:
        raise StateMismatchError(
            path, f"it has {len(data)} bytes, its header says {_HEAD.size + header_size + payload_size}"
        )
    header = data[_HEAD.size : _HEAD.size + header_size]
    payload = data[_HEAD.size + header_size :]
    if zlib.crc32(payload, zlib.crc32(header)) != checksum:
        raise StateMismatchError(path, "its checksum is wrong; it is damaged")
    return json.loads(header), payload


def refused(log: str) -> StateMismatchError:
    """llama.cpp itself refused the bytes."""
    return StateMismatchError(_MEMORY, f"llama.cpp refused it: {log or 'another version or cache shape?'}")


def write(path: str | PathLike[str], data: bytes) -> None:
    """Write a file whole or not at all."""
    with replacing(path, len(data)) as file:
        file.write(data)


def read(path: str | PathLike[str]) -> bytes:
    """The bytes of a saved file. Raises StateMismatchError if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StateMismatchError(path, f"it cannot be read: {error.strerror}") from error
