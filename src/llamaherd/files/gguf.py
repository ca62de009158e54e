"""GGUF, versions 1 to 3, either byte order, in one file or split over several.

The header is walked once with every length checked; values are parsed when they are asked for. Arrays are
skipped by their bounds, so opening costs the same whether the vocabulary has 32 entries or 262,144.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from pathlib import Path

from llamaherd.errors import (
    FileError,
    MalformedFileError,
    ModelNotFoundError,
    NotAModelFileError,
    UnsupportedFileError,
)
from llamaherd.files.block_types import block_type
from llamaherd.files.mapped import Cursor, MappedFile, Report, strict
from llamaherd.files.metadata import Metadata, TypedValue, Value, ValueType
from llamaherd.files.model_file import ModelFile, Tensor
from llamaherd.files.strings import StringArray, decode_text, scan_strings

__all__ = ["MAGIC", "open_gguf", "read_part"]

MAGIC = b"GGUF"

_MAX_DEPTH = 4  # arrays in arrays: the format allows them, no model uses them
_MAX_DIMS = 4  # GGML_MAX_DIMS
_MAX_ELEMENTS = 1 << 60  # sides beside a 0 count too: arrays of such shapes cannot be made
_MAX_ALIGNMENT = 1 << 24
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf$", re.DOTALL)

Loaders = dict[str, tuple[ValueType, "ValueType | None", Callable[[], Value]]]


@dataclass
class Part:
    """One GGUF file as parsed."""

    file: MappedFile
    version: int
    big_endian: bool
    alignment: int = 32
    metadata: Metadata = field(default_factory=lambda: Metadata({}))
    tensors: dict[str, Tensor] = field(default_factory=dict)
    data_start: int = 0


def open_gguf(file: MappedFile, *, report: Report = strict) -> ModelFile:
    """The model in ``file``, with its other parts if it is one of a split.

    ``report`` is called for each fault after which reading can go on; the default raises it.
    Raises MalformedFileError, ModelNotFoundError for a missing part, UnsupportedFileError.
    """
    part = read_part(file, report=report)
    count = _split_count(part)
    parts = [part] if count <= 1 else _open_split(part, count, report)
    tensors: dict[str, Tensor] = {}
    for index, each in enumerate(parts):
        for name, tensor in each.tensors.items():
            if name in tensors:
                report(MalformedFileError(each.file.path, f"tensor {name!r} is in an earlier part too"))
                continue
            tensors[name] = tensor if index == 0 else replace(tensor, part=index)
    first = parts[0]
    expected = first.metadata.get("split.tensors.count")
    if count > 1 and isinstance(expected, int) and expected != len(tensors):
        report(
            MalformedFileError(
                first.file.path, f"split.tensors.count is {expected}, the parts hold {len(tensors)} tensors"
            )
        )
    architecture = first.metadata.get("general.architecture")
    return ModelFile(
        [each.file for each in parts],
        container="gguf",
        version=first.version,
        architecture=architecture if isinstance(architecture, str) else None,
        metadata=first.metadata,
        tensors=tensors,
        alignment=first.alignment,
        big_endian=first.big_endian,
    )


def read_part(file: MappedFile, *, report: Report = strict) -> Part:
    """Parse the header of one GGUF file."""
    cursor = file.cursor()
    if cursor.take(4, "the magic number") != MAGIC:
        raise NotAModelFileError(file.path, "the file does not start with GGUF", 0)
    version = cursor.u32()
    if version & 0xFFFF == 0:  # a small number read in the wrong byte order
        cursor.big_endian = True
        cursor.at = 4
        version = cursor.u32()
    if not 1 <= version <= 3:
        raise UnsupportedFileError(file.path, f"GGUF version {version} is not known; 1, 2 and 3 are")
    part = Part(file, version, cursor.big_endian)
    count = cursor.u32 if version == 1 else cursor.u64
    n_tensors, n_pairs = count(), count()
    width = 4 if version == 1 else 8
    _bound(cursor, n_pairs, width + 5, "metadata pairs")
    _bound(cursor, n_tensors, width + 16, "tensors")
    part.metadata = Metadata(_read_pairs(cursor, n_pairs, width, report))
    part.alignment = _alignment(part, report)
    _read_tensors(cursor, part, n_tensors, width, report)
    return part


# ------------------------------------------------------------------------------------- metadata


def _bound(cursor: Cursor, count: int, least: int, what: str) -> None:
    """Refuse a count of things that cannot fit into what is left of the file."""
    if count > (cursor.size - cursor.at) // least:
        raise cursor.truncated(f"{count} {what}", count * least)


def _text(cursor: Cursor, width: int, what: str) -> bytes:
    length = cursor.u32() if width == 4 else cursor.u64()
    return cursor.take(length, what)


def _name(raw: bytes) -> str:
    """A key or tensor name; bytes that are not UTF-8 survive as lone surrogates and can be written again."""
    return raw.decode("utf-8", "surrogateescape")


def _value_type(cursor: Cursor) -> ValueType:
    number = cursor.u32()
    try:
        return ValueType(number)
    except ValueError:
        # its size is unknown, so nothing after it can be found
        raise cursor.malformed(f"metadata value type {number} is not known", cursor.at - 4) from None


def _read_pairs(cursor: Cursor, count: int, width: int, report: Report) -> Loaders:
    loaders: Loaders = {}
    for _ in range(count):
        start = cursor.at
        key = _name(_text(cursor, width, "a metadata key"))
        kind = _value_type(cursor)
        element, load = _read_value(cursor, kind, width, 0)
        if not key:
            report(cursor.malformed("a metadata key is empty", start))
        elif key in loaders:
            report(cursor.malformed(f"metadata key {key!r} appears twice", start))
        else:
            loaders[key] = (kind, element, load)
    return loaders


def _read_value(
    cursor: Cursor, kind: ValueType, width: int, depth: int
) -> tuple[ValueType | None, Callable[[], Value]]:
    """Step over one value; returns its element type (arrays) and what will parse it."""
    dtype = kind.dtype
    if dtype is not None:
        start = cursor.skip(dtype.itemsize, "a metadata value")
        if cursor.big_endian:
            dtype = dtype.newbyteorder(">")
        raw = cursor.data[start : start + dtype.itemsize]
        if kind is ValueType.BOOL:
            return None, lambda: bool(raw[0])
        return None, lambda: raw.view(dtype)[0].item()
    if kind is ValueType.STRING:
        length = cursor.u32() if width == 4 else cursor.u64()
        start = cursor.skip(length, "a metadata text")
        text = cursor.data[start : start + length]
        return None, lambda: decode_text(text.tobytes())
    return _read_array(cursor, width, depth)


def _read_array(cursor: Cursor, width: int, depth: int) -> tuple[ValueType, Callable[[], Value]]:
    element = _value_type(cursor)
    count = cursor.u32() if width == 4 else cursor.u64()
    dtype = element.dtype
    if dtype is not None:
        if cursor.big_endian:
            dtype = dtype.newbyteorder(">")
        start = cursor.skip(count * dtype.itemsize, f"a metadata array of {count} values")
        raw = cursor.data[start : cursor.at]
        if element is ValueType.BOOL:
            return element, lambda: raw != 0
        return element, lambda: raw.view(dtype)
    if element is ValueType.STRING:
        found = scan_strings(cursor.data, cursor.at, count, width=width, big_endian=cursor.big_endian)
        if found is None:
            raise cursor.truncated(f"a metadata array of {count} texts", count * width)
        texts = StringArray(cursor.data, found[0], found[1])
        cursor.at = found[2]
        return element, lambda: texts
    if depth + 1 >= _MAX_DEPTH:
        raise cursor.malformed(f"metadata arrays are nested more than {_MAX_DEPTH} deep")
    _bound(cursor, count, width + 4, "arrays in an array")
    inner = [_read_array(cursor, width, depth + 1) for _ in range(count)]
    return element, lambda: [TypedValue(ValueType.ARRAY, load(), of) for of, load in inner]


def _alignment(part: Part, report: Report) -> int:
    key = "general.alignment"
    if key not in part.metadata:
        return 32
    value = part.metadata[key]
    if part.metadata.type_of(key)[0] is not ValueType.UINT32 or not isinstance(value, int):
        report(MalformedFileError(part.file.path, f"{key} must be a u32"))
        return 32
    if value <= 0 or value & (value - 1) or value > _MAX_ALIGNMENT:
        report(MalformedFileError(part.file.path, f"{key} is {value}, which is not a power of two"))
        return 32
    return value


# -------------------------------------------------------------------------------------- tensors


@dataclass(slots=True)
class _Record:
    """A tensor's entry in the header; ``offset`` counts from the start of the data."""

    name: str
    shape: tuple[int, ...]
    number: int
    offset: int
    at: int


def _read_tensors(cursor: Cursor, part: Part, count: int, width: int, report: Report) -> None:
    records: dict[str, _Record] = {}
    for _ in range(count):
        record = _read_record(cursor, width)
        if record.name in records:
            report(cursor.malformed(f"tensor {record.name!r} appears twice", record.at))
        else:
            records[record.name] = record
    if count:
        cursor.align(part.alignment)
    part.data_start = cursor.at
    ordered = sorted(records.values(), key=lambda record: record.offset)
    # where a tensor must end at the latest
    ends = {a.name: b.offset for a, b in pairwise(ordered) if b.offset > a.offset}
    for record in records.values():
        tensor = _place(part, record, ends.get(record.name), report)
        if tensor is not None:
            part.tensors[record.name] = tensor
    _check_overlap(part, report)


def _read_record(cursor: Cursor, width: int) -> _Record:
    at = cursor.at
    name = _name(_text(cursor, width, "a tensor name"))
    n_dims = cursor.u32()
    if n_dims > _MAX_DIMS:
        raise cursor.malformed(f"tensor {name!r} has {n_dims} dimensions; at most {_MAX_DIMS} are possible")
    dim = cursor.u32 if width == 4 else cursor.u64
    shape = tuple(dim() for _ in range(n_dims))
    number = cursor.u32()
    return _Record(name, shape, number, cursor.u64(), at)


def _place(part: Part, record: _Record, next_offset: int | None, report: Report) -> Tensor | None:
    """The tensor of a record, if its data lies inside the file; otherwise the fault is reported."""
    file, kind = part.file, block_type(record.number)
    available = file.size - part.data_start
    row = record.shape[0] if record.shape else 1
    problem = None
    if prod(max(side, 1) for side in record.shape) >= _MAX_ELEMENTS:
        problem = f"has shape {record.shape}, more elements than any memory holds"
    elif record.offset > available:
        problem = f"starts {record.offset} bytes into the data, which has {available}"
    elif kind.known and row % kind.block_size:
        problem = f"has rows of {row}, not whole {kind} blocks of {kind.block_size}"
    if problem is None:
        if kind.known:
            nbytes = kind.nbytes(record.shape)
        else:
            nbytes = (available if next_offset is None else min(next_offset, available)) - record.offset
        if nbytes > available - record.offset:
            problem = f"needs {nbytes} bytes of data from byte {part.data_start + record.offset} on, "
            problem += f"but the file ends at {file.size}"
    if problem is not None:
        report(MalformedFileError(file.path, f"tensor {record.name!r} {problem}", record.at))
        return None
    start = part.data_start + record.offset
    data = file.data
    return Tensor(
        record.name,
        kind,
        record.shape,
        nbytes,
        lambda: data[start : start + nbytes],
        start,
        big_endian=part.big_endian,
    )


def _check_overlap(part: Part, report: Report) -> None:
    placed = sorted((t for t in part.tensors.values() if t.nbytes), key=lambda t: (t.offset or 0, t.nbytes))
    for a, b in pairwise(placed):
        end = (a.offset or 0) + a.nbytes
        if b.offset is not None and b.offset < end:
            message = f"tensors {a.name!r} and {b.name!r} overlap"
            report(MalformedFileError(part.file.path, message, b.offset))


# --------------------------------------------------------------------------------------- splits


def _split_count(part: Part) -> int:
    count = part.metadata.get("split.count", 0)
    return count if isinstance(count, int) and not isinstance(count, bool) else 0


def _open_split(part: Part, count: int, report: Report) -> list[Part]:
    """All parts of the split that ``part`` belongs to, in order."""
    path = part.file.path
    match = _SPLIT_NAME.match(path.name)
    if match is None or int(match[3]) != count:
        raise FileError(
            path,
            f"this is one of {count} files of a split model, but its name does not end in "
            f"-00001-of-{count:05d}.gguf, so the others cannot be found; give the files their names back",
        )
    parts: list[Part] = []
    seen = set()
    for index in range(count):
        name = path.with_name(f"{match[1]}-{index + 1:05d}-of-{count:05d}.gguf")
        each = part if name == path else _read_sibling(name, count, report)
        number = each.metadata.get("split.no")
        if number != index or each.file.identity in seen:
            raise MalformedFileError(
                name, f"this should be part {index} of a split model (from 0), but says split.no = {number!r}"
            )
        seen.add(each.file.identity)
        parts.append(each)
    return parts


def _read_sibling(path: Path, count: int, report: Report) -> Part:
    if not path.exists():
        raise ModelNotFoundError(path, f"it is one of {count} parts of a split model; fetch all of them")
    part = read_part(MappedFile(path), report=report)
    if _split_count(part) != count:
        raise MalformedFileError(path, f"split.count is {_split_count(part)}, in other parts {count}")
    return part
