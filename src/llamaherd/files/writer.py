"""Write GGUF version 3 from typed metadata and tensors: streamed, split on request, atomic.

The layout is that of ggml's ``gguf.cpp``; split files are named and keyed as ``llama-gguf-split`` does.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from llamaherd.errors import InvalidParameterError, UnsupportedFileError
from llamaherd.files.atomic import replacing, require_space
from llamaherd.files.metadata import Metadata, TypedValue, Value, ValueType, to_typed
from llamaherd.files.model_file import Tensor
from llamaherd.files.pieces import write_pieces
from llamaherd.files.strings import StringArray

__all__ = ["Progress", "encode_header", "split_path", "stream_gguf", "write_gguf"]

Progress: TypeAlias = Callable[[int, int], None]
"""Called as (bytes written, bytes in all) after every piece of at most 8 MiB."""

_VERSION = 3


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Value | TypedValue],
    tensors: Iterable[Tensor],
    *,
    alignment: int | None = None,
    split_size: int | None = None,
    progress: Progress | None = None,
    sync: bool = True,
) -> list[Path]:
    """Write a GGUF v3 file, or several, and return their paths in order.

    ``metadata`` values may be plain (typed by `to_typed`), typed, or a file's `Metadata`. ``alignment``
    (bytes, a power of two, at least 8) defaults to the metadata's ``general.alignment`` or 32.
    With ``split_size`` (bytes) tensors are spread over ``NAME-00001-of-0000N.gguf`` of at most that many
    bytes of tensor data each (a larger single tensor gets a file of its own); a model that fits into one
    stays one plain file. ``sync=False`` skips the flush to the disk.

    Nothing appears under the final names until all is written; free space is checked first. Raises
    FileError (folder, space, permissions), UnsupportedFileError (blocks of an older era) and
    InvalidParameterError (alignment, split_size, two tensors of one name, data of another length than
    ``nbytes``). Tensors are loaded one at a time, when their turn comes.
    """
    pairs = _typed_pairs(metadata)
    alignment = _settle_alignment(pairs, alignment)
    listed = list(tensors)
    _refuse_unwritable(path, listed)
    parts = _split(listed, split_size)
    paths = [Path(path)] if len(parts) == 1 else [split_path(path, i, len(parts)) for i in range(len(parts))]
    headers = [encode_header(p, part, alignment=alignment) for p, part in _parts(pairs, parts)]
    total = sum(len(h) for h in headers) + sum(_padded(t.nbytes, alignment) for t in listed)
    require_space(paths[0], total)
    done = 0
    with ExitStack() as stack:
        for target, header, part in zip(paths, headers, parts, strict=True):
            file = stack.enter_context(replacing(target, sync=sync))
            file.write(header)
            done += len(header)
            for tensor in part:
                for written in _write_tensor(file, tensor, alignment):
                    done += written
                    if progress is not None:
                        progress(done, total)
    return paths


def encode_header(
    metadata: Mapping[str, Value | TypedValue], tensors: Sequence[Tensor], *, alignment: int = 32
) -> bytes:
    """The bytes of a GGUF v3 file up to its tensor data, padding included.

    Tensor offsets are those of the data written one after another, each padded to ``alignment``.
    Only names, types, shapes and sizes of ``tensors`` are looked at.
    """
    pairs = _typed_pairs(metadata)
    out = bytearray(b"GGUF")
    out += struct.pack("<IQQ", _VERSION, len(tensors), len(pairs))
    for key, value in pairs.items():
        out += _text(key) + struct.pack("<I", value.type) + _payload(value)
    offset = 0
    for tensor in tensors:
        out += _text(tensor.name) + struct.pack("<I", len(tensor.shape))
        out += struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape)
        out += struct.pack("<IQ", tensor.type.number, offset)
        offset += _padded(tensor.nbytes, alignment)
    out += bytes(_padded(len(out), alignment) - len(out))
    return bytes(out)


def stream_gguf(
    file: BinaryIO, metadata: Mapping[str, Value | TypedValue], tensors: Sequence[Tensor]
) -> None:
    """Write one GGUF v3 file into an open binary file; tensors are loaded one at a time."""
    file.write(encode_header(metadata, tensors))
    for tensor in tensors:
        for _ in _write_tensor(file, tensor, 32):
            pass


def split_path(path: str | os.PathLike[str], index: int, count: int) -> Path:
    """The name of part ``index`` (from 0) of ``count``: ``model-00001-of-00003.gguf``."""
    path = Path(path)
    suffix = path.suffix if path.suffix == ".gguf" else ""
    stem = path.name.removesuffix(suffix)
    return path.with_name(f"{stem}-{index + 1:05d}-of-{count:05d}.gguf")


def _typed_pairs(metadata: Mapping[str, Value | TypedValue]) -> dict[str, TypedValue]:
    if isinstance(metadata, Metadata):
        return metadata.typed_items()
    return {key: to_typed(value) for key, value in metadata.items()}


def _settle_alignment(pairs: dict[str, TypedValue], wanted: int | None) -> int:
    """The alignment to use; ``general.alignment`` is set, changed or dropped to say the same."""
    stated = pairs.get("general.alignment")
    alignment = wanted if wanted is not None else int(stated.value) if stated is not None else 32  # type: ignore[arg-type]
    if alignment < 8 or alignment & (alignment - 1):
        raise InvalidParameterError("alignment", alignment, "a power of two, at least 8")
    if wanted is not None and (wanted != 32 or stated is not None):
        pairs["general.alignment"] = TypedValue(ValueType.UINT32, wanted)
    return alignment


def _refuse_unwritable(path: str | os.PathLike[str], tensors: list[Tensor]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise InvalidParameterError("tensors", tensor.name, "each name may be there once")
        seen.add(tensor.name)
        if tensor.type.era != 3 or tensor.big_endian:
            layout = "big-endian data" if tensor.big_endian else f"blocks of type {tensor.type}"
            raise UnsupportedFileError(
                path, f"a GGUF file cannot hold {layout} ({tensor.name}); convert the tensor first"
            )


def _split(tensors: list[Tensor], split_size: int | None) -> list[list[Tensor]]:
    if split_size is None:
        return [tensors]
    if split_size <= 0:
        raise InvalidParameterError("split_size", split_size, "a positive number of bytes")
    parts: list[list[Tensor]] = [[]]
    room = split_size
    for tensor in tensors:
        if parts[-1] and tensor.nbytes > room:
            parts.append([])
            room = split_size
        parts[-1].append(tensor)
        room -= tensor.nbytes
    return parts


def _parts(
    pairs: dict[str, TypedValue], parts: list[list[Tensor]]
) -> Iterator[tuple[dict[str, TypedValue], list[Tensor]]]:
    """Each part with its metadata: all of it in the first, the alignment and split keys in the others."""
    plain = {key: value for key, value in pairs.items() if not key.startswith("split.")}
    if len(parts) == 1:
        yield plain, parts[0]
        return
    count = sum(len(part) for part in parts)
    for index, part in enumerate(parts):
        kept = {k: v for k, v in plain.items() if index == 0 or k == "general.alignment"}
        kept["split.no"] = TypedValue(ValueType.UINT16, index)
        kept["split.count"] = TypedValue(ValueType.UINT16, len(parts))
        kept["split.tensors.count"] = TypedValue(ValueType.INT32, count)
        yield kept, part


def _write_tensor(file: BinaryIO, tensor: Tensor, alignment: int) -> Iterator[int]:
    """Write one tensor and its padding; yields the bytes of each piece written."""
    expected = tensor.nbytes
    raw = tensor.raw
    if raw.nbytes != expected:
        raise InvalidParameterError(
            "tensors", tensor.name, f"its data have {raw.nbytes} bytes where {expected} were announced"
        )
    yield from write_pieces(file, raw)
    padding = _padded(expected, alignment) - expected
    if padding:
        file.write(bytes(padding))
        yield padding


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _text(text: str | bytes) -> bytes:
    raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _payload(value: TypedValue) -> bytes:
    if value.type is ValueType.STRING:
        return _text(value.value)  # type: ignore[arg-type]
    if value.type is ValueType.ARRAY:
        return _array_payload(value)
    assert value.type.dtype is not None
    return np.array(value.value, value.type.dtype).tobytes()


def _array_payload(value: TypedValue) -> bytes:
    """An array as stored: element type, count, elements (arrays of arrays nest)."""
    assert value.element_type is not None
    items: Any = value.value
    head = struct.pack("<IQ", value.element_type, len(items))
    if value.element_type is ValueType.STRING:
        return head + _packed(items if isinstance(items, StringArray) else StringArray.from_texts(items))
    if value.element_type is ValueType.ARRAY:
        return head + b"".join(_array_payload(inner) for inner in items)
    return head + np.asarray(items, value.element_type.dtype).tobytes()


def _packed(texts: StringArray) -> bytes:
    """Each text after its length; copied whole where they lie so already, else all placed at once."""
    lengths = texts.lengths
    if not len(texts):
        return b""
    low = int(texts.starts[0]) - 8
    if low >= 0 and np.all(texts.starts[1:] - texts.starts[:-1] - lengths[:-1] == 8):
        region = texts.data[low : int(texts.starts[-1] + lengths[-1])]
        before = (texts.starts - 8 - low)[:, None] + np.arange(8)
        if np.array_equal(region[before].reshape(-1).view("<i8"), lengths):
            return region.tobytes()
    heads = np.cumsum(lengths + 8) - lengths - 8
    places = (heads[:, None] + np.arange(8)).reshape(-1)
    out = np.empty(int(lengths.sum()) + 8 * len(texts), np.uint8)
    is_text = np.ones(len(out), np.bool_)
    is_text[places] = False
    out[places] = lengths.astype("<i8").view(np.uint8)
    low = int(texts.starts[0])
    if np.array_equal(texts.starts - low, np.cumsum(lengths) - lengths):  # nothing lies between them
        out[is_text] = texts.data[low : low + int(lengths.sum())]
    else:
        out[is_text] = np.frombuffer(b"".join(texts.raws()), np.uint8)
    return out.tobytes()
