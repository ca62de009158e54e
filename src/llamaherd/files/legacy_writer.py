"""Write GGML, GGMF and GGJT 1 to 3: files that the readers of 2023 open.

What such a file cannot hold is refused; what its readers cannot know (they never heard of grouped-query
attention, of another rope base) is told in notes. Layouts: see `llamaherd.files.legacy`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from llamaherd.errors import InvalidParameterError
from llamaherd.files.atomic import replacing, require_space
from llamaherd.files.block_types import BlockType, block_type
from llamaherd.files.blocks import can_repack, repack
from llamaherd.files.contents import Contents, reorder_attention
from llamaherd.files.legacy import ALIGNMENT, HEADERS, MAGICS, SPLIT_BY_COLUMNS, VERSIONS
from llamaherd.files.legacy_header import LegacyReport, Target, encode_head, number
from llamaherd.files.model_file import Bytes, Tensor
from llamaherd.files.names import legacy_name
from llamaherd.files.pieces import write_pieces

__all__ = ["LegacyReport", "write_legacy"]

Progress = Callable[[int, int], None]

_NUMBERS = {name: magic for magic, name in MAGICS.items()}

# the types a reader of each era had; later ones (bf16, iq*, ...) no reader of these containers knows
_ERA_TYPES = {
    1: frozenset({0, 1, 2, 3, 4, 5, 6, 7, 8}),
    2: frozenset({0, 1, 2, 3, 6, 7, 8}),
    3: frozenset({0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14}),
}


def write_legacy(
    path: str | os.PathLike[str],
    contents: Contents,
    *,
    container: str = "ggjt",
    version: int | None = None,
    n_parts: int = 1,
    progress: Progress | None = None,
    sync: bool = True,
) -> LegacyReport:
    """Write ``contents`` as a file of before GGUF, whole or not at all.

    ``container`` is "ggml", "ggmf" or "ggjt"; ``version`` (ggjt: 1, 2 or 3) defaults to the last. With
    ``n_parts`` (GGML and GGMF, llama) the model goes into ``path``, ``path.1``, ... as LLaMA's first releases
    did. ``progress`` is called as (bytes written, bytes in all).
    Raises UnsupportedFileError naming what the container cannot hold, FileError for the disk.
    """
    if container not in ("ggml", "ggmf", "ggjt"):
        raise InvalidParameterError("container", container, "one of ggml, ggmf, ggjt")
    versions = VERSIONS.get(container, (None,))
    version = versions[-1] if version is None else version
    if version not in versions:
        raise InvalidParameterError("version", version, f"one of {versions}")
    target = Target(Path(path), container, version, contents.architecture)
    if target.architecture not in HEADERS:
        raise target.refuse(f"architecture {target.architecture!r} did not exist then")
    report = LegacyReport([target.path, *(Path(f"{path}.{i}") for i in range(1, n_parts))])
    tensors = _tensors(target, contents, report)
    head = encode_head(target, contents, tensors, report)
    plans = _plan(target, tensors, n_parts)
    total = sum(len(head) + sum(item.nbytes for item in plan) for plan in plans)
    require_space(target.path, total)
    done = 0
    with ExitStack() as stack:
        for name, plan in zip(report.paths, plans, strict=True):
            file = stack.enter_context(replacing(name, sync=sync))
            for count in _write(file, target, head, plan):
                done += count
                if progress is not None:
                    progress(min(done, total), total)
    return report


# -------------------------------------------------------------------------------------- tensors


def _tensors(target: Target, contents: Contents, report: LegacyReport) -> dict[str, Tensor]:
    """The tensors under their old names, in the target's blocks (repacked when loaded)."""
    stored = dict(contents.stored)
    if contents.stored is contents.tensors:  # in GGUF's order of rows
        n_embd = number(contents, "embedding_length") or 0
        n_head = number(contents, "attention.head_count") or 0
        n_kv = number(contents, "attention.head_count_kv") or n_head
        reorder_attention(stored, target.architecture, n_embd, n_head, n_kv, back=True)
    out: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        old = legacy_name(name, target.architecture)
        if old is None:
            raise target.refuse(f"its readers know no tensor like {name}")
        out[old] = _old_type(target, replace(tensor, name=old), report)
    _add_tied_output(target, out, report)
    return out


def _add_tied_output(target: Target, tensors: dict[str, Tensor], report: LegacyReport) -> None:
    """Today a missing output head means the embeddings; the readers of then wanted it written out."""
    output = legacy_name("output.weight", target.architecture)
    embeddings = legacy_name("token_embd.weight", target.architecture)
    if output is None or embeddings is None or output in tensors or embeddings not in tensors:
        return
    tensors[output] = replace(tensors[embeddings], name=output)
    report.notes.append("the output head shares the embeddings; it is written out a second time")


def _old_type(target: Target, tensor: Tensor, report: LegacyReport) -> Tensor:
    """The tensor in a type of the target's era."""
    if len(tensor.shape) > 2 or any(side >= 1 << 31 for side in tensor.shape):
        raise target.refuse(f"{tensor.name} has shape {tensor.shape}; two sides of 31 bits are possible")
    if len(tensor.shape) == 1 and tensor.type.number != 0:
        if tensor.type.number not in (1, 30):
            raise target.refuse(f"{tensor.name} is {tensor.type}, and one-dimensional tensors must be f32")
        wide = block_type(0)
        load = lambda: tensor.dequantize().reshape(-1).view(np.uint8)  # noqa: E731
        return replace(tensor, type=wide, nbytes=wide.nbytes(tensor.shape), load=load, offset=None)
    wanted = block_type(tensor.type.number, target.era)
    if tensor.type.number not in _ERA_TYPES[target.era] or not can_repack(tensor.type, wanted):
        known = ", ".join(block_type(n, target.era).name for n in sorted(_ERA_TYPES[target.era]))
        raise target.refuse(
            f"{tensor.name} has type {tensor.type.name}; its readers know {known}; "
            "convert to one of these with --type first"
        )
    if wanted == tensor.type:
        return tensor

    def repacked() -> Bytes:
        try:
            raw, report.roundings[tensor.name] = repack(tensor.raw, tensor.type, wanted)
        except ValueError as error:
            raise target.refuse(f"{tensor.name}: {error}") from None
        return raw

    return replace(tensor, type=wanted, nbytes=wanted.nbytes(tensor.shape), load=repacked, offset=None)


# -------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class _Item:
    """One tensor of one file."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    nbytes: int
    load: Callable[[], Bytes]


def _plan(target: Target, tensors: dict[str, Tensor], n_parts: int) -> list[list[_Item]]:
    """What goes into each file."""
    if n_parts > 1 and (target.container == "ggjt" or target.architecture != "llama"):
        raise InvalidParameterError("n_parts", n_parts, "1 for GGJT and architectures other than llama")
    if n_parts == 1:
        return [[_Item(t.name, t.type, t.shape, t.nbytes, t.load) for t in tensors.values()]]
    return [[_part_of(target, t, i, n_parts) for t in tensors.values()] for i in range(n_parts)]


def _part_of(target: Target, tensor: Tensor, index: int, n_parts: int) -> _Item:
    if len(tensor.shape) == 1:
        return _Item(tensor.name, tensor.type, tensor.shape, tensor.nbytes, tensor.load)
    columns, rows = tensor.shape
    by_columns = tensor.name.endswith(SPLIT_BY_COLUMNS)
    length = columns if by_columns else rows
    step = tensor.type.block_size if by_columns else 1
    if length % (n_parts * step):
        raise target.refuse(f"{tensor.name} of shape {tensor.shape} cannot be cut into {n_parts} parts")
    shape = (columns // n_parts, rows) if by_columns else (columns, rows // n_parts)

    def load() -> Bytes:
        matrix = tensor.raw.reshape(rows, -1)
        if by_columns:
            width = matrix.shape[1] // n_parts
            return np.ascontiguousarray(matrix[:, index * width : (index + 1) * width]).reshape(-1)
        height = rows // n_parts
        return matrix[index * height : (index + 1) * height].reshape(-1)

    return _Item(tensor.name, tensor.type, shape, tensor.type.nbytes(shape), load)


def _write(file: BinaryIO, target: Target, head: bytes, plan: list[_Item]) -> Iterator[int]:
    """Write one file; yields the bytes of each piece."""
    file.write(head)
    yield len(head)
    for item in plan:
        name = item.name.encode("utf-8", "surrogateescape")
        record = struct.pack("<iiI", len(item.shape), len(name), item.type.number)
        file.write(record + struct.pack(f"<{len(item.shape)}i", *item.shape) + name)
        if target.container == "ggjt":
            file.write(bytes(-file.tell() % ALIGNMENT))
        data = item.load()
        if data.nbytes != item.nbytes:
            raise target.refuse(f"{item.name} has {data.nbytes} bytes of data, {item.nbytes} are needed")
        yield from write_pieces(file, data)
