"""From any container into any other, and between float types.

Nothing is requantised here: blocks are copied, or repacked where an era's layout differs (exactly, but for
scales that become f16). f32, f16 and bf16 are made here; quantised types are libllama's to make, through
the ``quantize`` that the caller gives.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from llamaherd.errors import FileError, InvalidParameterError, UnsupportedFileError
from llamaherd.files.adapters import adapter_contents
from llamaherd.files.block_types import BlockType, block_type
from llamaherd.files.blocks import Rounding, encode_floats
from llamaherd.files.contents import Assumptions, Contents, contents_of
from llamaherd.files.legacy_writer import write_legacy
from llamaherd.files.metadata import TypedValue, ValueType
from llamaherd.files.model_file import Bytes, ModelFile, Tensor
from llamaherd.files.opening import open_model
from llamaherd.files.writer import write_gguf

__all__ = ["FLOAT_TYPES", "FORMATS", "Conversion", "convert"]

Progress = Callable[[int, int], None]
Quantizer = Callable[[Path, Path, str], None]
"""Called as (source GGUF, target GGUF, type name); makes the target with libllama's quantiser."""

FORMATS: dict[str, tuple[str, int | None]] = {
    "gguf": ("gguf", None),
    "ggjt": ("ggjt", 3),
    "ggjt1": ("ggjt", 1),
    "ggjt2": ("ggjt", 2),
    "ggjt3": ("ggjt", 3),
    "ggmf": ("ggmf", 1),
    "ggml": ("ggml", None),
}
"""What ``to`` may be: name -> (container, version)."""

FLOAT_TYPES = {"f32": block_type(0), "f16": block_type(1), "bf16": block_type(30)}
_FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32}  # llama_ftype

# matrices that llama.cpp keeps in f32 in every file (tensor_allows_quantization): small or delicate
_KEPT = (
    "_norm.weight", "ffn_gate_inp", "altup", "laurel", "per_layer_model_proj", "position_embd", "token_types",
    "ssm_conv1d", "shortconv.conv", "time_mix_", "attn_rel_b",
)  # fmt: skip


@dataclass
class Conversion:
    """What `convert` did: the files written, what to know about them, what was rounded by tensor.

    ``quantised`` is the type that libllama's quantiser was asked for, if it was.
    """

    paths: list[Path]
    notes: list[str] = field(default_factory=list)
    roundings: dict[str, Rounding] = field(default_factory=dict)
    quantised: str | None = None

    def summary(self) -> str:
        """One line about what happened to the weights."""
        if self.quantised is not None:
            return f"quantised to {self.quantised} by libllama"
        total = sum(self.roundings.values(), Rounding())
        if not total.changed:
            return "lossless: no weight changed"
        return (
            f"{total.changed} of {total.count} scales or weights were rounded, by at most "
            f"{total.largest:.2g} of their value"
        )


def convert(
    source: ModelFile,
    path: str | os.PathLike[str],
    *,
    to: str = "gguf",
    type: str | None = None,
    assume: Assumptions | None = None,
    n_parts: int = 1,
    split_size: int | None = None,
    quantize: Quantizer | None = None,
    progress: Progress | None = None,
    sync: bool = True,
) -> Conversion:
    """Write the open model ``source`` to ``path`` in another container, and another type if asked.

    to: see `FORMATS`. type: "f32", "f16" or "bf16" for the matrices; any other name goes to ``quantize``.
    assume: what files before GGUF do not say. n_parts: GGML and GGMF in several files. split_size: GGUF in
    several files of at most so many bytes. progress: called as (bytes written, bytes in all).

    The result appears whole or not at all. Raises UnsupportedFileError naming what the container cannot
    hold, InvalidParameterError for an unknown ``to`` or ``type``, FileError for the disk.
    """
    if to not in FORMATS:
        raise InvalidParameterError("to", to, f"one of {', '.join(FORMATS)}")
    _refuse_own_parts(source, path)
    if source.container == "ggla":
        return _convert_adapter(source, path, to, type, sync=sync, progress=progress)
    if type is not None and type.lower() not in FLOAT_TYPES:
        plain = _Options(to, assume, n_parts, split_size, progress, sync)
        return _quantized(source, path, type.lower(), quantize, plain)
    contents = contents_of(source, assume=assume, exact=type == "f32")
    result = Conversion([], contents.notes, contents.roundings)
    if type is not None:
        _retype(contents, type.lower())
    container, version = FORMATS[to]
    if container == "gguf":
        result.paths = write_gguf(
            path,
            dict(contents.metadata),
            list(contents.tensors.values()),
            split_size=split_size,
            progress=progress,
            sync=sync,
        )
        return result
    written = write_legacy(
        path, contents, container=container, version=version, n_parts=n_parts, progress=progress, sync=sync
    )
    result.paths, result.roundings = written.paths, contents.roundings | written.roundings
    result.notes = [note for note in contents.notes if "becomes" not in note] + written.notes
    return result


def _refuse_own_parts(source: ModelFile, path: str | os.PathLike[str]) -> None:
    for part in source.parts:
        if Path(path).exists() and os.path.samefile(part.path, path):
            raise InvalidParameterError("path", str(path), "another file than the one being read")


def _convert_adapter(
    source: ModelFile,
    path: str | os.PathLike[str],
    to: str,
    type: str | None,
    *,
    sync: bool,
    progress: Progress | None,
) -> Conversion:
    if to != "gguf" or type is not None:
        raise UnsupportedFileError(source.path, "a ggla adapter can only become a GGUF one of the same type")
    metadata, tensors = adapter_contents(source)
    return Conversion(write_gguf(path, dict(metadata), tensors, sync=sync, progress=progress))


@dataclass(frozen=True)
class _Options:
    """The arguments of `convert` that a conversion in two steps passes on."""

    to: str
    assume: Assumptions | None
    n_parts: int
    split_size: int | None
    progress: Progress | None
    sync: bool


def _quantized(
    source: ModelFile, path: str | os.PathLike[str], type: str, quantize: Quantizer | None, options: _Options
) -> Conversion:
    """Through a GGUF beside the target, which libllama's quantiser reads and writes."""
    if quantize is None:
        raise InvalidParameterError(
            "type", type, f"one of {', '.join(FLOAT_TYPES)}; quantised types need libllama (quantize=...)"
        )
    folder = Path(path).absolute().parent / f".llamaherd-{os.getpid()}"
    made = folder / "quantised.gguf"
    plain = source.path
    notes: list[str] = []
    try:
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise FileError(path, f"cannot be written: {error.strerror}") from error
        if source.container != "gguf" or source.version == 1 or source.big_endian:
            plain = folder / "plain.gguf"
            notes = convert(source, plain, assume=options.assume, sync=False).notes
        quantize(plain, made, type)
        with open_model(made) as model:
            result = convert(
                model,
                path,
                to=options.to,
                n_parts=options.n_parts,
                split_size=options.split_size,
                progress=options.progress,
                sync=options.sync,
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result.notes = [*notes, *result.notes]
    result.quantised = type
    return result


# ---------------------------------------------------------------------------------- float types


def _retype(contents: Contents, name: str) -> None:
    """Give every matrix the float type called ``name``; small tensors stay f32 as llama.cpp keeps them."""
    wanted = FLOAT_TYPES[name]
    for key, tensor in contents.tensors.items():
        kept = len(tensor.shape) < 2 or any(part in key for part in _KEPT) or not key.endswith("weight")
        target = block_type(0) if kept and tensor.type.number != 26 else wanted
        if tensor.type.number in (24, 25, 26, 27) or tensor.type == target:
            continue
        contents.tensors[key] = _retyped(tensor, target, contents)
    contents.stored = contents.tensors
    contents.metadata["general.file_type"] = TypedValue(ValueType.UINT32, _FILE_TYPES[name])


def _retyped(tensor: Tensor, target: BlockType, contents: Contents) -> Tensor:
    def load() -> Bytes:
        try:
            raw, rounding = encode_floats(tensor.dequantize().reshape(-1), target)
        except ValueError as error:
            raise UnsupportedFileError(tensor.name, f"a weight does not fit {target}: {error}") from None
        contents.roundings[tensor.name] = rounding
        return raw

    return replace(tensor, type=target, nbytes=target.nbytes(tensor.shape), offset=None, load=load)
