"""Files of the ggml family; knows nothing of libllama."""

from __future__ import annotations

from os import PathLike

from llamaherd.errors import NotAModelFileError
from llamaherd.files import gguf
from llamaherd.files.mapped import MappedFile
from llamaherd.files.model_file import ModelFile, Tensor

__all__ = ["ModelFile", "Tensor", "open"]


def open(path: str | PathLike[str], *, architecture: str | None = None) -> ModelFile:
    """Open a model file by mapping it; its kind is told by its first bytes.

    GGUF 1-3 (also split: name any part). Nothing but the header is read.
    Raises ModelNotFoundError, NotAModelFileError, MalformedFileError (with the offset), UnsupportedFileError.
    """
    file = MappedFile(path)
    magic = file.data[:4].tobytes()
    if magic == gguf.MAGIC:
        return gguf.open_gguf(file)
    raise NotAModelFileError(file.path, f"the first bytes, {magic!r}, are not those of a model file", 0)
