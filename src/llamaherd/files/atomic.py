"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from llamaherd.errors import FileError

__all__ = ["replacing", "require_space"]


def require_space(path: str | os.PathLike[str], size: int) -> None:
    """Raise FileError if the folder of ``path`` has fewer than ``size`` bytes free, or does not exist."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise FileError(path, f"the folder {folder} does not exist; make it first")
    free = shutil.disk_usage(folder).free
    if free < size:
        raise FileError(
            path, f"writing needs {size} bytes, but {folder} has {free} free; make room or choose another"
        )


@contextmanager
def replacing(path: str | os.PathLike[str], size: int = 0, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file beside ``path`` for writing; rename it to ``path`` when the block ends.

    Free space for ``size`` bytes is checked first. The data are flushed to the disk before the rename
    (unless ``sync`` is False), so that a crash leaves the old file or the new one. If the block raises
    anything, KeyboardInterrupt included, the temporary file is removed and ``path`` is untouched.
    Raises FileError where the folder is missing, full or not writable.
    """
    target = Path(path)
    if "\0" in str(target) or not _encodable(target):
        raise FileError(path, "no file can have that name: it holds a NUL or a lone surrogate")
    require_space(target, size)
    if target.is_dir():
        raise FileError(path, "is a folder; name a file to write")
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        # opened inside: an interrupt may come between the file's appearance and the next statement
        try:
            file = open(partial, "wb")  # noqa: SIM115 - closed below, before the rename
        except OSError as error:
            raise FileError(path, f"cannot be written: {error.strerror}") from error
        with file:
            try:
                yield file
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            except OSError as error:
                raise FileError(path, f"writing failed: {error.strerror or error}") from error
        os.replace(partial, target)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    if sync:
        _sync_folder(target.absolute().parent)


def _encodable(path: Path) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the file system lets a folder be synced."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
