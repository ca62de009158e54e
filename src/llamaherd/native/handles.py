"""Owned pointers: freed once, when they are closed and no call or view uses them any more."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

from ..errors import ClosedError

__all__ = ["Handle", "Pointer"]


class Pointer:
    """An address that ctypes takes as an argument; what is there is freed after the last use of this.

    Whoever hands it to C, or reads memory that belongs to it, holds it meanwhile: another thread's close()
    then frees nothing under him.
    """

    __slots__ = ("__weakref__", "_as_parameter_")

    def __init__(self, address: Any) -> None:
        self._as_parameter_ = address

    @property
    def address(self) -> int:
        """The address, for a struct; hold this object as long as it is there."""
        return ctypes.cast(self._as_parameter_, ctypes.c_void_p).value or 0


class Handle:
    """A pointer that llama.cpp gave us and that ``free`` takes back.

    ``keep`` lives until it is freed (callbacks, buffers, the Pointer of what this one depends on).
    """

    def __init__(
        self, pointer: Any, free: Callable[[Any], Any], what: str, keep: tuple[Any, ...] = ()
    ) -> None:
        self._pointer: Pointer | None = Pointer(pointer)
        self._what = what
        finalizer = weakref.finalize(self._pointer, _free, free, pointer, keep)
        # at exit the operating system takes everything back; freeing under a running thread would crash
        finalizer.atexit = False

    @property
    def pointer(self) -> Pointer:
        """The pointer. Raises ClosedError after close()."""
        pointer = self._pointer
        if pointer is None:
            raise ClosedError(self._what)
        return pointer

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._pointer is None

    def close(self) -> None:
        """Give the pointer up; it is freed now, or when those who use it are done. Idempotent."""
        self._pointer = None


def _free(free: Callable[[Any], Any], pointer: Any, _keep: tuple[Any, ...]) -> None:
    free(pointer)
