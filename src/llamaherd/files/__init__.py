"""Files of the ggml family; knows nothing of libllama."""

from __future__ import annotations

from os import PathLike

from llamaherd.errors import NotAModelFileError
from llamaherd.files import ggjt, gguf
from llamaherd.files.legacy import MAGICS
from llamaherd.files.mapped import MappedFile
from llamaherd.files.model_file import ModelFile, Tensor

__all__ = ["ModelFile", "Tensor", "open"]


def open(path: str | PathLike[str], *, architecture: str | None = None) -> ModelFile:
    """Open a model file by mapping it; its kind is told by its first bytes.

    GGUF 1-3 (also split: name any part), GGML, GGMF, GGJT 1-3 (also in parts: name the first), ggla.
    Nothing but headers is read. ``architecture`` says what a file before GGUF holds ("llama", "gptneox",
    "gpt2", "gptj", "bloom", "mpt", "falcon") where its tensors' names do not tell.
    Raises ModelNotFoundError, NotAModelFileError, MalformedFileError (with the offset), UnsupportedFileError.
    """
    file = MappedFile(path)
    magic = file.data[:4].tobytes()
    if magic == gguf.MAGIC:
        return gguf.open_gguf(file)
    if magic in MAGICS:
        return ggjt.open_legacy(file, architecture=architecture)
    raise NotAModelFileError(file.path, f"the first bytes, {magic!r}, are not those of a model file", 0)
