"""Slices on disk: made once for each model, range and way of cutting, and found again by their content."""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from os import PathLike
from pathlib import Path

from .. import files
from ..errors import FileError
from ..files.atomic import replacing
from ..files.layers import count_layers
from ..files.slice import check_cut, slice_model

__all__ = ["SliceStore", "content_hash", "read_range"]

_FORMAT = 1  # of slices: another one is cut again
_PIECE = 8 << 20


def read_range(path: str | PathLike[str]) -> tuple[int, int, int] | None:
    """(start, end, layers of the whole) of a slice; None of a whole model. Raises FileError."""
    with files.open(path) as model:
        values = [model.metadata.get(f"llamaherd.slice.{key}") for key in ("start", "end", "layers")]
    if any(type(value) is not int for value in values):
        return None
    start, end, layers = values
    assert isinstance(start, int)
    assert isinstance(end, int)
    assert isinstance(layers, int)
    if not 0 <= start < end <= layers:
        raise FileError(path, f"says that it holds layers [{start}, {end}) of {layers}, which cannot be")
    return start, end, layers


def content_hash(path: str | PathLike[str]) -> str:
    """SHA-256 of a file, in hexadecimal. Raises FileError."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
    except OSError as error:
        raise FileError(path, f"cannot be read ({error.strerror})") from error
    return digest.hexdigest()


class SliceStore:
    """A folder of slices.

    Args:
        folder: ``LLAMAHERD_SLICES``, else ``llamaherd/slices`` in the user's cache folder.
    """

    def __init__(self, folder: str | PathLike[str] | None = None) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.folder = Path(folder or os.environ.get("LLAMAHERD_SLICES") or cache / "llamaherd" / "slices")

    def identity(self, path: str | PathLike[str]) -> str:
        """The content hash of a model, all of its files together. Raises FileError."""
        with files.open(path) as model:
            paths = [part.path for part in model.parts]
        return hashlib.sha256("".join(self.content_hash(p) for p in paths).encode()).hexdigest()

    def content_hash(self, path: str | PathLike[str]) -> str:
        """content_hash(), remembered as long as the file does not change. Raises FileError."""
        try:
            status = os.stat(path)
        except OSError as error:
            raise FileError(path, f"cannot be read ({error.strerror})") from error
        # ctime as well: the time of modification can be set, and archives set it
        look = repr((os.path.abspath(path), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns,
                     status.st_ctime_ns))  # fmt: skip
        note = self.folder / f"{hashlib.sha256(look.encode()).hexdigest()[:32]}.sha256"
        found = _read_hash(note)
        if found is None:
            found = content_hash(path)
            self._write_hash(note, found)
        return found

    def _write_hash(self, note: Path, found: str) -> None:
        self.make_folder()
        with replacing(note) as file:
            file.write(found.encode())

    def make_folder(self) -> None:
        """Have the folder. Raises FileError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(
                self.folder, f"cannot be made ({error.strerror}); set LLAMAHERD_SLICES to a folder for slices"
            ) from error

    def place(self, identity: str, start: int, end: int) -> Path:
        """Where the slice of layers [start, end) of a model of that content hash is kept."""
        return self.folder / f"{identity[:32]}-{start}-{end}.v{_FORMAT}.gguf"

    def slice(self, path: str | PathLike[str], start: int, end: int) -> tuple[Path, int]:
        """The slice of layers [start, end), cut now if it is not there, and the layers of the whole.

        Raises FileError, UnsupportedFileError, InvalidParameterError: it cannot be cut there.
        """
        target = self.place(self.identity(path), start, end)
        with files.open(path) as model:
            check_cut(model, start, end)
            layers = count_layers(model)
            if not self._is_whole(target):
                self.make_folder()
                _remove_remains(target)
                slice_model(model, start, end, target)
                self._write_hash(_note_of(target), self.content_hash(target))
        return target, layers

    def _is_whole(self, target: Path) -> bool:
        """Whether a slice is there, and is what was once cut; a renamed or damaged one is cut again."""
        cut = _read_hash(_note_of(target))
        return cut is not None and target.is_file() and self.content_hash(target) == cut


def _note_of(target: Path) -> Path:
    return target.with_suffix(".sha256")


def _read_hash(note: Path) -> str | None:
    try:
        found = note.read_bytes()
    except OSError:
        return None
    return found.decode() if re.fullmatch(rb"[0-9a-f]{64}", found) else None


def _remove_remains(target: Path) -> None:
    """Of processes that were killed while they cut this slice."""
    for partial in target.parent.glob(f".{target.name}.*.part"):
        pid = partial.name.split(".")[-2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            with suppress(OSError):
                partial.unlink()
