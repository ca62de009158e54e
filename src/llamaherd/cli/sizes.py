"""Sizes as people write them: 2G, 512M, 100k, 4096."""

from __future__ import annotations

import re

from llamaherd.errors import InvalidParameterError

__all__ = ["format_size", "parse_size"]

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: str, name: str = "size") -> int:
    """Bytes from a number with an optional unit (powers of 1024). Raises InvalidParameterError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if size < 1:
        raise InvalidParameterError(name, text, "a size such as 2G, 512M or 4096")
    return size


def format_size(size: float) -> str:
    """Bytes with three digits and a unit: 104 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.3g} {unit}"
        size /= 1024
    raise AssertionError
