"""Keep weights away from llama.cpp's AMX kernels.

They end the process at the first product in many builds (llama.cpp issue 20824). Older GCCs, those of
Debian 12 and Ubuntu 22.04 among them, declare in their ``_tile_loadconfig`` only the first bytes of the
configuration as read, so the compiler drops the stores of the rest. llama.cpp asks a list of buffer types
which of them takes a weight, the same list that llamaherd-kernels joins: without AMX's entry, its repacked
kernels or ours compute. ``LLAMAHERD_AMX=on`` leaves the entry there, for a build that works.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

from .library import GGML

__all__ = ["amx_is_wanted", "without_amx"]

_VARIABLE = "LLAMAHERD_AMX"
_P = ctypes.c_void_p


class _Vector(ctypes.Structure):
    """``std::vector<ggml_backend_buffer_type_t>`` of libstdc++ and libc++."""

    _fields_ = (("begin", _P), ("end", _P), ("capacity", _P))

    def read(self) -> list[int]:
        count = ((self.end or 0) - (self.begin or 0)) // ctypes.sizeof(_P)
        return list((ctypes.c_size_t * count).from_address(self.begin)) if count else []

    def write(self, entries: list[int]) -> None:
        """Fewer entries than there were room for."""
        if entries:
            ctypes.memmove(
                self.begin, (ctypes.c_size_t * len(entries))(*entries), ctypes.sizeof(_P) * len(entries)
            )
        self.end = (self.begin or 0) + len(entries) * ctypes.sizeof(_P)


def amx_is_wanted() -> bool:
    """Whether ``LLAMAHERD_AMX`` says that llama.cpp's AMX kernels may be used."""
    return os.environ.get(_VARIABLE, "off").lower() in ("on", "1")


@contextlib.contextmanager
def without_amx() -> Iterator[None]:
    """Take AMX's entry out of llama.cpp's list of buffer types, before a model is loaded.

    llama.cpp copies the list when it is first asked for, inside or at the end of this. Where it was copied
    before, models may already lie in AMX's layout, so the entry comes back.
    """
    vector = None if amx_is_wanted() else _buffer_types()
    entries = vector.read() if vector is not None else []
    others = [entry for entry in entries if GGML.ggml_backend_buft_name(entry) != b"AMX"]
    if vector is None or len(others) == len(entries):
        yield
        return
    vector.write(others)
    yield
    if not set(_copied()).isdisjoint(set(entries) - set(others)):
        vector.write(entries)


def _buffer_types() -> _Vector | None:
    function = getattr(GGML, "_Z39ggml_backend_cpu_get_extra_buffer_typesv", None)
    if function is None:  # a compiler with other names for C++: it made no AMX kernels by GCC's header
        return None
    function.restype, function.argtypes = ctypes.POINTER(_Vector), []
    vector: _Vector = function().contents
    return vector


def _copied() -> list[int]:
    """The copy that models are loaded by: ``ggml_backend_dev_get_extra_bufts`` of the CPU device."""
    registry = GGML.ggml_backend_cpu_reg()
    address = GGML.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return []
    found = ctypes.CFUNCTYPE(ctypes.POINTER(_P), _P)(address)(GGML.ggml_backend_reg_dev_get(registry, 0))
    entries: list[int] = []
    while found and (entry := found[len(entries)]):
        entries.append(entry)
    return entries
