"""Owned pointers: freed once, by close() or when nothing refers to them any more."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ..errors import ClosedError

__all__ = ["Handle"]


class Handle:
    """A pointer that llama.cpp gave us and that ``free`` takes back.

    ``keep`` lives as long as the handle (callbacks, buffers, the handle that this one depends on).
    """

    def __init__(
        self, pointer: int, free: Callable[[int], Any], what: str, keep: tuple[Any, ...] = ()
    ) -> None:
        self._pointer: int | None = pointer
        self._what = what
        self._keep = keep
        # the finalizer holds ``keep`` too: it must outlive the call of free
        self._finalizer = weakref.finalize(self, _free, free, pointer, keep)
        # at exit the operating system takes everything back; freeing under a running thread would crash
        self._finalizer.atexit = False

    @property
    def pointer(self) -> int:
        """The pointer. Raises ClosedError after close()."""
        if self._pointer is None:
            raise ClosedError(self._what)
        return self._pointer

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._pointer is None

    def close(self) -> None:
        """Free the pointer; idempotent."""
        self._pointer = None
        self._finalizer()
        self._keep = ()


def _free(free: Callable[[int], Any], pointer: int, _keep: tuple[Any, ...]) -> None:
    free(pointer)
