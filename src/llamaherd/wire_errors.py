"""Errors that cross from one process to another and arrive as what they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from . import errors
from .errors import LlamaherdError

__all__ = ["WireError", "pack_error", "unpack_error", "valid_text"]


class WireError(msgspec.Struct, frozen=True, array_like=True):
    """An exception: the name of its class in llamaherd.errors, its message and its attributes."""

    kind: str
    message: str
    data: dict[str, Any]


def valid_text(text: str) -> str:
    """Lone surrogates, which no encoding takes, become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _tree(root: type[LlamaherdError]) -> Iterator[type[LlamaherdError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _tree(kind)


_KINDS = {kind.__name__: kind for kind in _tree(LlamaherdError) if kind.__module__ == errors.__name__}
_LONGEST = 20_000  # characters of a message or of an attribute


def pack_error(error: LlamaherdError) -> WireError:
    """An error for the wire: what it says, and those of its attributes that are plain values."""
    kind = next(k.__name__ for k in type(error).__mro__ if k.__name__ in _KINDS)
    return WireError(kind, valid_text(str(error))[:_LONGEST], dict(_plain(vars(error))))


def _plain(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, str):
            yield name, valid_text(value)[:_LONGEST]
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            continue
        elif value is None or isinstance(value, (int, float)):
            yield name, value


def unpack_error(wire: WireError) -> LlamaherdError:
    """An error of the same type, message and attributes."""
    kind = _KINDS.get(wire.kind, LlamaherdError)
    error = kind.__new__(kind)
    Exception.__init__(error, wire.message)
    error.__dict__.update(wire.data)
    return error
