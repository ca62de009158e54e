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

from ..config import _integers
from ..errors import StateMismatchError
from ..files.atomic import replacing
from ..native.params import cache_type
from .model import Model

__all__ = ["SavedSequence", "fingerprint_of", "pack", "read", "saved_tokens", "unpack", "write"]

_MAGIC = b"LHSEQ1\r\n"
_HEAD = struct.Struct("<8sIQI")  # magic, header bytes, payload bytes, CRC-32 of header and payload
_MEMORY = "saved sequence"


@dataclass(frozen=True)
class SavedSequence:
    """An unpacked state: llama.cpp's bytes, how many tokens they hold, and which, if they were given."""

    payload: bytes
    length: int
    tokens: tuple[int, ...]


def fingerprint_of(model: Model, params: Mapping[str, Any], lora_scales: Sequence[float]) -> dict[str, Any]:
    """What a state depends on: it fits no other model and no other settings."""
    loras = zip(model.loras, lora_scales, strict=False)
    return {
        "architecture": model.architecture,
        "description": model.description,
        "n_params": model.n_params,
        "size": model.size,
        "n_vocab": model.vocabulary.n_tokens,
        "type_k": cache_type(params.get("type_k", "f16"), "type_k"),
        "type_v": cache_type(params.get("type_v", "f16"), "type_v"),
        "swa_full": bool(params.get("swa_full", True)),
        "rope": {k: v for k, v in params.items() if k.startswith(("rope_", "yarn_"))},
        "flash_attn_type": str(params.get("flash_attn_type", "auto")),
        "loras": [(lora.path, scale) for lora, scale in loras if scale],
    }


def pack(payload: bytes, fingerprint: Mapping[str, Any], length: int, tokens: Sequence[int]) -> bytes:
    """The envelope around a payload; ``fingerprint`` must be equal when it is unpacked."""
    header = json.dumps(
        {"for": fingerprint, "length": length, "tokens": _integers("tokens", tokens)}
    ).encode()
    checksum = zlib.crc32(payload, zlib.crc32(header))
    return _HEAD.pack(_MAGIC, len(header), len(payload), checksum) + header + payload


def unpack(data: bytes, fingerprint: Mapping[str, Any], path: str = _MEMORY) -> SavedSequence:
    """Check an envelope and open it. Raises StateMismatchError."""
    header, payload = _open(data, path)
    saved, wanted = header.get("for"), json.loads(json.dumps(fingerprint))
    if not isinstance(saved, dict):
        raise StateMismatchError(path, "its header does not say what it was saved from")
    for key, value in wanted.items():
        if saved.get(key) != value:
            raise StateMismatchError(
                path, f"it was saved with {key} = {saved.get(key)!r}, this context has {value!r}"
            )
    length = header.get("length")
    if type(length) is not int or length < 0:
        raise StateMismatchError(path, f"its header says that it holds {length!r:.40} tokens")
    return SavedSequence(payload, length, _tokens(header, path))


def saved_tokens(data: bytes) -> tuple[int, ...]:
    """The tokens that were saved beside a state. Raises StateMismatchError."""
    return _tokens(_open(data, _MEMORY)[0], _MEMORY)


def _tokens(header: Mapping[str, Any], path: str) -> tuple[int, ...]:
    tokens = header.get("tokens")
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        raise StateMismatchError(path, "its header's tokens are no token ids")
    return tuple(tokens)


def _open(data: bytes, path: str) -> tuple[dict[str, Any], bytes]:
    if not isinstance(data, (bytes, bytearray)) or len(data) < _HEAD.size or data[:8] != _MAGIC:
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
    try:
        fields = json.loads(header)
    except ValueError as error:
        raise StateMismatchError(path, f"its header is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise StateMismatchError(path, "its header is no JSON object")
    return fields, payload


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
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise StateMismatchError(path, f"it cannot be read: {error}") from error
