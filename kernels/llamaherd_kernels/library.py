"""The compiled plug-in: its levels (one for each instruction set) and its functions."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

__all__ = ["CACHE_TYPES", "TYPES", "available_levels", "levels", "library_path", "load"]

TYPES = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "IQ4_NL": 20,
    "MXFP4": 39,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "Q2_K": 10,
    "Q3_K": 11,
    "IQ4_XS": 23,
    "F16": 1,
    "BF16": 30,
}
"""Weight types that have kernels, by their number in ggml."""

CACHE_TYPES = {"F16": 1, "Q8_0": 8, "BF16": 30, "F32": 0}
"""Types of keys and values that attention takes, by their number in ggml."""


def library_path() -> Path:
    """The plug-in's file; ``LLAMAHERD_KERNELS_LIBRARY`` names another build (sanitizers)."""
    return Path(
        os.environ.get("LLAMAHERD_KERNELS_LIBRARY") or Path(__file__).parent / "libllamaherd_kernels.so"
    )


@functools.cache
def load() -> Any:
    """The plug-in, with its functions' types set. Loading it changes nothing in llama.cpp.

    Raises:
        OSError: it was not built, or not for this machine.
    """
    library = ctypes.CDLL(str(library_path()))
    text, pointer, integer, wide = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    for name, result, arguments in (
        ("levels", text, []),
        ("runs", integer, [text]),
        ("install", text, [pointer, text, ctypes.c_uint64, integer]),
        ("take_attention", integer, [integer]),
        ("attend", integer, [text, pointer, integer]),
        ("counts", None, [ctypes.POINTER(wide)]),
        ("packed_bytes", ctypes.c_size_t, [text, integer, wide, wide]),
        ("pack", None, [text, integer, wide, wide, pointer, pointer]),
        ("multiply", None, [text, integer, wide, wide, wide, pointer, pointer, pointer, integer, integer]),
        ("peak", wide, [text, wide]),
        ("read", None, [pointer, wide]),
    ):
        function = getattr(library, f"llamaherd_kernels_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def levels() -> list[str]:
    """All levels that are built in, best first; the emulated ones are for tests."""
    found: bytes = load().llamaherd_kernels_levels()
    return found.decode().split()


def available_levels() -> list[str]:
    """The levels whose instructions this CPU has, best first."""
    return [
        name
        for name in levels()
        if not name.startswith("emulated") and load().llamaherd_kernels_runs(name.encode())
    ]
