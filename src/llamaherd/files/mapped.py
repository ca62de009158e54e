"""A file mapped into memory, and a cursor that checks every length before it reads.

The mapping is read-only and shared with the page cache: two processes that open one model hold its pages
once. As with every mapping, truncating the file while it is open kills the reader; replace model files by
renaming, as our own writers do.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from llamaherd.errors import (
    FileError,
    MalformedFileError,
    ModelNotFoundError,
    NotAModelFileError,
    TruncatedFileError,
)

__all__ = ["Cursor", "MappedFile", "Report", "strict"]

Report = Callable[[MalformedFileError], None]
"""Called by the readers for each fault after which reading can go on."""


def strict(fault: MalformedFileError) -> None:
    """The usual `Report`: refuse the file."""
    raise fault


class MappedFile:
    """The bytes of the file at ``path``, mapped: ``data`` is a read-only uint8 array over them.

    There is no explicit unmapping: the pages go when the last view of them does, so that no view can dangle.
    Raises ModelNotFoundError, NotAModelFileError for an empty file, FileError for what cannot be mapped.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_size == 0:
                    raise NotAModelFileError(self.path, "the file is empty")
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelNotFoundError(self.path) from None
        except IsADirectoryError:
            raise ModelNotFoundError(self.path, "this is a folder; name a file in it") from None
        except (OSError, ValueError) as error:
            raise FileError(self.path, f"cannot be opened: {error}") from error
        self.identity = (stat.st_dev, stat.st_ino)
        self.data: npt.NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)
        self.size = len(self.data)

    def cursor(self, at: int = 0, *, big_endian: bool = False) -> Cursor:
        """A cursor over the whole file, starting at byte ``at``."""
        return Cursor(self.path, self.data, at, big_endian=big_endian)


def _reader(code: str, what: str) -> Callable[[Cursor], Any]:
    little, big = Struct("<" + code), Struct(">" + code)
    size = little.size

    def read(self: Cursor) -> Any:
        at = self.at
        if at + size > self.size:
            raise self.truncated(what, size)
        self.at = at + size
        return (big if self.big_endian else little).unpack_from(self.view, at)[0]

    read.__doc__ = f"Read {what}; TruncatedFileError if it is not there."
    return read


class Cursor:
    """A place in a file's bytes that moves as values are read; no read goes past the end.

    A plain class with slots because a GGUF header is thousands of small reads.
    """

    __slots__ = ("at", "big_endian", "data", "path", "size", "view")

    def __init__(
        self, path: Path, data: npt.NDArray[np.uint8], at: int = 0, *, big_endian: bool = False
    ) -> None:
        self.path = path
        self.data = data
        self.view = data.data
        self.size = len(data)
        self.at = at
        self.big_endian = big_endian

    u8: ClassVar[Callable[[Cursor], int]] = _reader("B", "a u8")
    u32: ClassVar[Callable[[Cursor], int]] = _reader("I", "a u32")
    i32: ClassVar[Callable[[Cursor], int]] = _reader("i", "an i32")
    u64: ClassVar[Callable[[Cursor], int]] = _reader("Q", "a u64")
    f32: ClassVar[Callable[[Cursor], float]] = _reader("f", "an f32")

    def take(self, n: int, what: str) -> bytes:
        """A copy of the next ``n`` bytes."""
        at = self.at
        if n < 0 or n > self.size - at:
            raise self.truncated(what, n)
        self.at = at + n
        return bytes(self.view[at : at + n])

    def skip(self, n: int, what: str) -> int:
        """Move past the next ``n`` bytes, which must be there; returns where they start."""
        at = self.at
        if n < 0 or n > self.size - at:
            raise self.truncated(what, n)
        self.at = at + n
        return at

    def align(self, alignment: int) -> None:
        """Move up to the next multiple of ``alignment`` (not past the end of the file)."""
        self.at = min(self.at + -self.at % alignment, self.size)

    def truncated(self, what: str, n: int) -> TruncatedFileError:
        """The error for ``n`` bytes of ``what`` that the file does not have here."""
        return TruncatedFileError(self.path, what, needed=self.at + n, size=self.size, offset=self.at)

    def malformed(self, message: str, at: int | None = None) -> MalformedFileError:
        """The error for bytes that break the format, here or at byte ``at``."""
        return MalformedFileError(self.path, message, self.at if at is None else at)
