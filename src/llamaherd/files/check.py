"""All faults of a model file, not only the first.

Most rules are asserts or refusals of llama.cpp (gguf.cpp, llama-model.cpp, llama-vocab.cpp).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np

from llamaherd.errors import FileError, MalformedFileError
from llamaherd.files.adapters import adapter_contents
from llamaherd.files.blocks import scales
from llamaherd.files.check_metadata import check_metadata, check_vocabulary
from llamaherd.files.check_tensors import check_tensors
from llamaherd.files.contents import Contents, contents_of
from llamaherd.files.faults import Fault, Faults
from llamaherd.files.model_file import ModelFile, Tensor
from llamaherd.files.opening import open_model

__all__ = ["check"]

_MAX_NAME = 64  # GGML_MAX_NAME, with the final NUL
_CHUNK = 64 << 20
_MAX_SIDE = (1 << 63) - 1


def check(
    path: str | os.PathLike[str],
    *,
    architecture: str | None = None,
    weights: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> list[Fault]:
    """Every fault of the model file at ``path``; if none is an error, it can be used.

    ``weights`` also reads all tensor data for NaN and infinite scales; ``progress`` is called as (bytes
    read, bytes in all). Raises only ModelNotFoundError and FileError for files that cannot be opened at all.
    """
    faults = Faults()

    def report(error: MalformedFileError) -> None:
        faults.error("file", _reason(error), error.offset)

    try:
        model = open_model(path, architecture=architecture, report=report)
    except MalformedFileError as error:
        report(error)
        return faults.found
    except FileError as error:
        if not os.path.isfile(path):
            raise
        faults.error("file", _reason(error))
        return faults.found
    with model:
        _check_model(model, faults, weights, progress)
    return faults.found


def _reason(error: FileError) -> str:
    """The error's message without the path it starts with, and without the offset it ends with."""
    text = str(error).removeprefix(f"{error.path}: ")
    offset = getattr(error, "offset", None)
    return text.removesuffix(f" (at byte {offset})") if offset is not None else text


def _check_model(
    model: ModelFile, faults: Faults, weights: bool, progress: Callable[[int, int], None] | None
) -> None:
    if model.container == "gguf":
        _check_layout(model, faults)
    contents: Contents | None = None
    try:
        if model.container == "ggla":
            adapter_contents(model)
        else:
            contents = contents_of(model)
    except FileError as error:
        faults.error("file", _reason(error))
    if not model.tensors:
        faults.error("file", "there are no tensors")
    if contents is not None and not _is_adapter(contents):
        check_metadata(contents, faults)
        check_vocabulary(contents, faults)
        check_tensors(contents, faults)
    if weights:
        _check_weights(model, faults, progress)


def _is_adapter(contents: Contents) -> bool:
    kind = contents.values().get("general.type")
    return isinstance(kind, str) and kind != "model"


# --------------------------------------------------------------------------------------- layout


def _check_layout(model: ModelFile, faults: Faults) -> None:
    """What gguf.cpp refuses although the bytes could be read."""
    if model.version == 1:
        faults.warning("file", "libllama no longer reads GGUF version 1; convert the file to GGUF")
    if model.big_endian:
        faults.warning("file", "the file is big-endian; libllama on this machine does not read it")
    for key in model.metadata:
        kind, element = model.metadata.type_of(key)
        if element is not None and element.name == "ARRAY":
            faults.error(key, "arrays of arrays are refused by libllama")
        if kind.name == "STRING" and isinstance(model.metadata[key], bytes):
            faults.warning(key, "the text is not valid UTF-8")
    for tensor in model.tensors.values():
        _check_type(tensor, faults)
    for part in range(len(model.parts)):
        placed = [tensor for tensor in model.tensors.values() if tensor.part == part]
        _check_order(placed, model.alignment, faults)


def _check_type(tensor: Tensor, faults: Faults) -> None:
    if len(tensor.name.encode("utf-8", "surrogateescape")) >= _MAX_NAME:
        faults.error(tensor.name, f"the name has {_MAX_NAME} bytes or more, which libllama refuses")
    if "\0" in tensor.name or not tensor.name:
        faults.error(tensor.name or "file", "a tensor's name is empty or holds a NUL")
    if tensor.type.removed:
        faults.error(tensor.name, f"libllama does not read tensor type {tensor.type} ({tensor.type.number})")
    if 0 in tensor.shape or not tensor.shape:
        faults.error(tensor.name, f"the shape {tensor.shape} has no elements")
    if any(dim > _MAX_SIDE for dim in tensor.shape):
        faults.error(tensor.name, f"the shape {tensor.shape} has a side of more than 63 bits")


def _check_order(placed: list[Tensor], alignment: int, faults: Faults) -> None:
    """libllama: tensors lie in the order of their entries, each padded to the alignment."""
    expected: int | None = None
    for tensor in placed:
        offset = tensor.offset or 0
        if expected is not None and offset != expected:
            faults.error(
                tensor.name,
                f"its data start at byte {offset}, libllama expects them at byte {expected}",
                offset,
            )
        if offset % alignment:
            faults.error(tensor.name, f"its data are not aligned to {alignment} bytes", offset)
        expected = offset + -(-tensor.nbytes // alignment) * alignment


# -------------------------------------------------------------------------------------- weights


def _check_weights(model: ModelFile, faults: Faults, progress: Callable[[int, int], None] | None) -> None:
    total = sum(tensor.nbytes for tensor in model.tensors.values())
    done = 0
    for tensor in model.tensors.values():
        nan, inf = 0, 0
        if tensor.type.known and not tensor.big_endian:
            for piece in _pieces(tensor):
                values = scales(piece, tensor.type)
                if values is None:
                    break
                # a sum is NaN or infinite exactly where an element is, unless it overflows
                with np.errstate(invalid="ignore", over="ignore"):
                    suspicious = not np.isfinite(np.sum(values, dtype=np.float64))
                if suspicious:
                    nan += int(np.isnan(values).sum())
                    inf += int(np.isinf(values).sum())
        what = "weights" if tensor.type.block_size == 1 else "scales"
        if nan:
            faults.error(tensor.name, f"{nan} {what} are NaN", tensor.offset)
        if inf:
            faults.error(tensor.name, f"{inf} {what} are infinite", tensor.offset)
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)


def _pieces(tensor: Tensor) -> Iterator[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
    raw = tensor.raw
    step = max(_CHUNK // tensor.type.block_bytes, 1) * tensor.type.block_bytes
    for start in range(0, len(raw), step):
        yield raw[start : start + step]
