"""Files of the ggml family; knows nothing of libllama.

`open` maps any of them; `contents_of` says an open one in GGUF's terms, `convert` writes it as another,
`check` lists all its faults.
"""

from __future__ import annotations

from os import PathLike

from llamaherd.files.adapters import adapter_contents
from llamaherd.files.check import check
from llamaherd.files.contents import Assumptions, Contents, contents_of
from llamaherd.files.convert import Conversion, convert
from llamaherd.files.faults import Fault
from llamaherd.files.model_file import ModelFile, Tensor
from llamaherd.files.opening import open_model
from llamaherd.files.vocabulary import find_duplicate_token

__all__ = [
    "Assumptions",
    "Contents",
    "Conversion",
    "Fault",
    "ModelFile",
    "Tensor",
    "adapter_contents",
    "check",
    "contents_of",
    "convert",
    "find_duplicate_token",
    "open",
]


def open(path: str | PathLike[str], *, architecture: str | None = None) -> ModelFile:
    """Open a model file of any container; only headers are read.

    GGUF 1-3 (also split: name any part), GGML, GGMF, GGJT 1-3 (also in parts: name the first), ggla.
    ``architecture`` says what a file before GGUF holds where its tensors' names do not tell.
    Raises ModelNotFoundError, NotAModelFileError, MalformedFileError (with the offset), UnsupportedFileError.
    """
    return open_model(path, architecture=architecture)
