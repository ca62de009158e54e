"""Open any file of the family: its first bytes say which reader takes it."""

from __future__ import annotations

from os import PathLike

from llamaherd.errors import NotAModelFileError
from llamaherd.files import ggjt, gguf
from llamaherd.files.legacy import MAGICS
from llamaherd.files.mapped import MappedFile, Report, strict
from llamaherd.files.model_file import ModelFile

__all__ = ["open_model"]


def open_model(
    path: str | PathLike[str], *, architecture: str | None = None, report: Report = strict
) -> ModelFile:
    """Open a model file by mapping it; its kind is told by its first bytes.

    GGUF 1-3 (also split: name any part), GGML, GGMF, GGJT 1-3 (also in parts: name the first), ggla.
    Nothing but headers is read. ``architecture`` says what a file before GGUF holds ("llama", "gptneox",
    "gpt2", "gptj", "bloom", "mpt", "falcon") where its tensors' names do not tell. ``report`` is called for
    each fault after which reading can go on; the default raises it.
    Raises ModelNotFoundError, NotAModelFileError, MalformedFileError (with the offset), UnsupportedFileError.
    """
    file = MappedFile(path)
    magic = file.data[:4].tobytes()
    if magic == gguf.MAGIC:
        return gguf.open_gguf(file, report=report)
    if magic in MAGICS:
        return ggjt.open_legacy(file, architecture=architecture, report=report)
    raise NotAModelFileError(file.path, f"the first bytes, {magic!r}, are not those of a model file", 0)
