"""The containers before GGUF: GGML, GGMF, GGJT 1 to 3, models in several parts, and ggla adapters.

The metadata shown are the header's own fields, plus ``tokens`` and, where the container has them, ``scores``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llamaherd.errors import FileError, MalformedFileError, ModelNotFoundError, UnsupportedFileError
from llamaherd.files.block_types import BlockType, block_type
from llamaherd.files.legacy import (
    ALIGNMENT,
    FLOATS,
    HEADERS,
    MAGICS,
    SPLIT_BY_COLUMNS,
    VERSIONS,
    block_era,
    fits_architecture,
)
from llamaherd.files.mapped import Cursor, MappedFile, Report, strict
from llamaherd.files.metadata import Metadata, TypedValue, Value, ValueType
from llamaherd.files.model_file import Bytes, ModelFile, Tensor
from llamaherd.files.strings import StringArray, scan_strings

__all__ = ["open_legacy"]


_MAX_DIMS = 2
_MAX_PARTS = 64


@dataclass
class _Part:
    """One file as parsed."""

    file: MappedFile
    container: str
    version: int | None
    architecture: str
    header: dict[str, int | float] = field(default_factory=dict)
    era: int = 1
    tokens: StringArray | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)


def open_legacy(file: MappedFile, *, architecture: str | None = None, report: Report = strict) -> ModelFile:
    """The model in ``file``; ``architecture`` is inferred from the tensors' names unless given.

    Raises MalformedFileError, UnsupportedFileError (unknown version or architecture), ModelNotFoundError for
    a missing part. ``report`` is called for each fault after which reading can go on.
    """
    cursor = file.cursor()
    container = MAGICS[cursor.take(4, "the magic number")]
    version = cursor.u32() if container in VERSIONS else None
    if version is not None and version not in VERSIONS[container]:
        known = ", ".join(map(str, VERSIONS[container]))
        raise UnsupportedFileError(
            file.path, f"{container.upper()} version {version} is not known; known: {known}"
        )
    if container == "ggla":
        return _open_adapter(cursor, file, report)
    start = cursor.at
    found = architecture or _infer(file, container, version, start)
    if found not in HEADERS:
        raise UnsupportedFileError(
            file.path,
            f"no {container.upper()} files of architecture {found!r} are known; "
            f"known: {', '.join(sorted(HEADERS))}",
        )
    part = _Part(file, container, version, found)
    _read_head(cursor, part)
    _read_tensors(cursor, part, report)
    parts = [part, *_other_parts(part, start, report)]
    tensors = part.tensors if len(parts) == 1 else _join(parts, report)
    return ModelFile(
        [each.file for each in parts],
        container=container,
        version=version,
        architecture=found,
        metadata=_metadata(part),
        tensors=tensors,
        alignment=ALIGNMENT if container == "ggjt" else 1,
    )


# --------------------------------------------------------------------------------------- header


def _infer(file: MappedFile, container: str, version: int | None, start: int) -> str:
    """The architecture whose header, vocabulary and first tensor's name fit the file."""
    first_error: MalformedFileError | None = None
    readable = False
    for architecture in HEADERS:
        part = _Part(file, container, version, architecture)
        cursor = file.cursor(start)
        try:
            _read_head(cursor, part)
            if cursor.at == cursor.size:
                continue  # no tensor whose name could tell
            name = _read_record(cursor, part)[0]
        except MalformedFileError as error:
            first_error = first_error or error
            continue
        if fits_architecture(name, architecture):
            return architecture
        readable = True
    if first_error is not None and not readable:
        raise first_error
    raise UnsupportedFileError(
        file.path,
        "the header and tensor names fit no architecture this container was used for; "
        f"name it with architecture=..., one of {', '.join(sorted(HEADERS))}",
    )


def _read_head(cursor: Cursor, part: _Part) -> None:
    """Read the header's fields and the vocabulary."""
    start = cursor.at
    for name in HEADERS[part.architecture]:
        part.header[name] = cursor.f32() if name in FLOATS else cursor.i32()
    header = part.header
    for name in ("n_vocab", "n_embd", "n_head", "n_layer"):
        if header[name] <= 0:
            raise cursor.malformed(f"the header's {name} is {header[name]}", start)
    if header.get("n_vocab_again", header["n_vocab"]) != header["n_vocab"]:
        raise cursor.malformed(
            f"the header says n_vocab = {header['n_vocab']} and {header['n_vocab_again']}", start
        )
    if header["ftype"] < 0:
        raise cursor.malformed(f"the header's ftype is {header['ftype']}", start)
    part.era = block_era(part.container, part.version, int(header["ftype"]))
    _read_vocabulary(cursor, part, int(header["n_vocab"]))


def _read_vocabulary(cursor: Cursor, part: _Part, count: int) -> None:
    gap = 0 if part.container == "ggml" else 4
    found = scan_strings(cursor.data, cursor.at, count, width=4, gap=gap)
    if found is None:
        raise cursor.truncated(f"a vocabulary of {count} entries", count * (4 + gap))
    starts, lengths, cursor.at = found
    part.tokens = StringArray(cursor.data, starts, lengths)


def _metadata(part: _Part) -> Metadata:
    values: dict[str, Value | TypedValue] = {}
    for name, number in part.header.items():
        kind = ValueType.FLOAT32 if name in FLOATS else ValueType.INT32
        values[name] = TypedValue(kind, number)
    tokens = part.tokens
    if tokens is not None:
        values["tokens"] = tokens
        if part.container != "ggml":
            # each score follows its text, at no alignment: a view with one float at every byte
            data = part.file.data
            floats: npt.NDArray[np.float32] = np.ndarray((len(data) - 3,), "<f4", data.data, strides=(1,))
            values["scores"] = floats[tokens.starts + tokens.lengths]
    return Metadata.from_values(values)


# -------------------------------------------------------------------------------------- tensors


def _read_record(cursor: Cursor, part: _Part) -> tuple[str, BlockType, tuple[int, ...]]:
    """A tensor's name, type and shape; the cursor is left at its data."""
    at = cursor.at
    n_dims, name_length, number = cursor.i32(), cursor.i32(), cursor.u32()
    if not 1 <= n_dims <= _MAX_DIMS:
        raise cursor.malformed(f"a tensor has {n_dims} dimensions; 1 or 2 are possible", at)
    shape = tuple(cursor.i32() for _ in range(n_dims))
    name = cursor.take(name_length, "a tensor's name").decode("utf-8", "surrogateescape")
    if any(dim < 0 for dim in shape):
        raise cursor.malformed(f"tensor {name!r} has shape {shape}", at)
    kind = block_type(number, part.era)
    if not kind.known:
        # nothing after it can be found: records follow one another
        raise cursor.malformed(f"tensor {name!r} has the unknown type {number}", at)
    if shape[0] % kind.block_size:
        raise cursor.malformed(
            f"tensor {name!r} has rows of {shape[0]}, not whole {kind} blocks of {kind.block_size}", at
        )
    if part.container in ("ggjt", "ggla"):
        cursor.align(ALIGNMENT)
    return name, kind, shape


def _read_tensors(cursor: Cursor, part: _Part, report: Report) -> None:
    while cursor.at < cursor.size:
        at = cursor.at
        name, kind, shape = _read_record(cursor, part)
        nbytes = kind.nbytes(shape)
        start = cursor.skip(nbytes, f"tensor {name!r}")
        if name in part.tensors:
            report(cursor.malformed(f"tensor {name!r} appears twice", at))
            continue
        part.tensors[name] = _tensor(name, kind, shape, part.file.data[start : cursor.at], start)


def _tensor(name: str, kind: BlockType, shape: tuple[int, ...], raw: Bytes, start: int) -> Tensor:
    return Tensor(name, kind, shape, len(raw), lambda: raw, start)


def _open_adapter(cursor: Cursor, file: MappedFile, report: Report) -> ModelFile:
    """A ggla file: rank, alpha, and pairs of small matrices."""
    part = _Part(file, "ggla", 1, "llama", era=3)
    part.header = {"r": cursor.i32(), "alpha": cursor.i32()}
    if part.header["r"] <= 0:
        raise cursor.malformed(f"the adapter's rank r is {part.header['r']}", cursor.at - 8)
    _read_tensors(cursor, part, report)
    return ModelFile(
        [file],
        container="ggla",
        version=1,
        architecture="llama",
        metadata=_metadata(part),
        tensors=part.tensors,
        alignment=ALIGNMENT,
    )


# ---------------------------------------------------------------------------------------- parts


def _other_parts(first: _Part, start: int, report: Report) -> list[_Part]:
    """The files x.1, x.2, ... of a model cut into parts; how many says the width of the embeddings."""
    embeddings = first.tensors.get("tok_embeddings.weight")
    n_embd = int(first.header["n_embd"])
    if first.architecture != "llama" or embeddings is None or embeddings.shape[0] == n_embd:
        return []
    width = embeddings.shape[0]
    if width == 0 or n_embd % width or n_embd // width > _MAX_PARTS:
        report(
            MalformedFileError(
                first.file.path, f"tok_embeddings has rows of {width}, which is no part of n_embd = {n_embd}"
            )
        )
        return []
    if first.container == "ggjt":
        raise FileError(
            first.file.path,
            f"tok_embeddings has rows of {width} where n_embd is {n_embd}: a model in parts, "
            "which GGJT does not have",
        )
    return [_read_other(first, index, start, report) for index in range(1, n_embd // width)]


def _read_other(first: _Part, index: int, start: int, report: Report) -> _Part:
    path = first.file.path
    name = Path(f"{path}.{index}")
    if not name.exists():
        hint = "fetch all of them" if path.suffix[1:].isdigit() is False else "open the one without a number"
        raise ModelNotFoundError(name, f"it is one of the parts of {path.name}; {hint}")
    file = MappedFile(name)
    part = _Part(file, first.container, first.version, first.architecture)
    if file.data[:start].tobytes() != first.file.data[:start].tobytes():
        raise MalformedFileError(name, f"this is not a part of {path.name}: it is another container", 0)
    cursor = file.cursor(start)
    _read_head(cursor, part)
    if part.header != first.header:
        raise MalformedFileError(name, f"this is not a part of {path.name}: its header differs", start)
    _read_tensors(cursor, part, report)
    return part


def _join(parts: list[_Part], report: Report) -> dict[str, Tensor]:
    """Tensors put together from all parts, when they are asked for."""
    joined: dict[str, Tensor] = {}
    for name, first in parts[0].tensors.items():
        pieces = [part.tensors.get(name) for part in parts]
        same = [p for p in pieces if p is not None and (p.type, p.shape) == (first.type, first.shape)]
        if len(same) != len(parts):
            report(MalformedFileError(parts[0].file.path, f"tensor {name!r} differs in the other parts"))
            continue
        if len(first.shape) == 1:
            joined[name] = first  # every part has a copy
        else:
            joined[name] = _joined(first, same, by_columns=name.endswith(SPLIT_BY_COLUMNS))
    return joined


def _joined(first: Tensor, pieces: list[Tensor], *, by_columns: bool) -> Tensor:
    columns, rows = first.shape
    n = len(pieces)
    shape = (columns * n, rows) if by_columns else (columns, rows * n)

    def load() -> Bytes:
        if not by_columns:
            return np.concatenate([piece.raw for piece in pieces])
        return np.concatenate([piece.raw.reshape(rows, -1) for piece in pieces], axis=1).reshape(-1)

    return Tensor(first.name, first.type, shape, first.type.nbytes(shape), load)
