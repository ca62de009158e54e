"""Write GGML, GGMF and GGJT 1 to 3: files that the readers of 2023 open.

What such a file cannot hold is refused; what its readers cannot know (they never heard of grouped-query
attention, of another rope base) is told in notes. Layouts: see `llamaherd.files.legacy`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from llamaherd.errors import InvalidParameterError, UnsupportedFileError
from llamaherd.files import vocabulary
from llamaherd.files.atomic import replacing, require_space
from llamaherd.files.block_types import BlockType, block_type
from llamaherd.files.blocks import Rounding, can_repack, repack
from llamaherd.files.contents import Contents, reorder_attention
from llamaherd.files.legacy import ALIGNMENT, FLOATS, HEADERS, MAGICS, SPLIT_BY_COLUMNS, VERSIONS
from llamaherd.files.model_file import Bytes, Tensor
from llamaherd.files.names import legacy_name
from llamaherd.files.pieces import write_pieces
from llamaherd.files.strings import StringArray

__all__ = ["LegacyReport", "write_legacy"]

Progress = Callable[[int, int], None]

_NUMBERS = {name: magic for magic, name in MAGICS.items()}

# the types a reader of each era had; later ones (bf16, iq*, ...) no reader of these containers knows
_ERA_TYPES = {
    1: frozenset({0, 1, 2, 3, 4, 5, 6, 7, 8}),
    2: frozenset({0, 1, 2, 3, 6, 7, 8}),
    3: frozenset({0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14}),
}

# header's ftype of a file whose matrices are mostly of a type (llama_ftype)
_FTYPES = {0: 0, 1: 1, 2: 2, 3: 3, 4: 5, 5: 6, 6: 8, 7: 9, 8: 7, 10: 10, 11: 12, 12: 15, 13: 17, 14: 18}

_VERSION_OF_ERA = {1: 0, 2: 1, 3: 2}  # ggml's quantisation version, which rustformers stored in ftype


@dataclass
class LegacyReport:
    """What was written: the files, what a user should know, what was rounded by tensor."""

    paths: list[Path]
    notes: list[str] = field(default_factory=list)
    roundings: dict[str, Rounding] = field(default_factory=dict)


@dataclass(frozen=True)
class _Target:
    path: Path
    container: str
    version: int | None
    architecture: str

    @property
    def era(self) -> int:
        """llama.cpp's containers had the blocks of their time; rustformers put today's into all of them."""
        if self.container == "ggjt":
            return self.version or 1
        return 1 if self.architecture == "llama" else 3

    def refuse(self, reason: str) -> UnsupportedFileError:
        return UnsupportedFileError(self.path, f"a {self.name} file cannot hold this model: {reason}")

    @property
    def name(self) -> str:
        return self.container.upper() + (f" {self.version}" if self.container == "ggjt" else "")


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
    target = _Target(Path(path), container, version, contents.architecture)
    if target.architecture not in HEADERS:
        raise target.refuse(f"architecture {target.architecture!r} did not exist then")
    report = LegacyReport([target.path, *(Path(f"{path}.{i}") for i in range(1, n_parts))])
    tensors = _tensors(target, contents, report)
    head = _head(target, contents, tensors, report)
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


def _tensors(target: _Target, contents: Contents, report: LegacyReport) -> dict[str, Tensor]:
    """The tensors under their old names, in the target's blocks (repacked when loaded)."""
    stored = dict(contents.stored)
    if contents.stored is contents.tensors:  # in GGUF's order of rows
        n_embd = _number(contents, "embedding_length") or 0
        n_head = _number(contents, "attention.head_count") or 0
        n_kv = _number(contents, "attention.head_count_kv") or n_head
        reorder_attention(stored, target.architecture, n_embd, n_head, n_kv, back=True)
    out: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        old = legacy_name(name, target.architecture)
        if old is None:
            raise target.refuse(f"its readers know no tensor like {name}")
        out[old] = _old_type(target, replace(tensor, name=old), report)
    _add_tied_output(target, out, report)
    return out


def _add_tied_output(target: _Target, tensors: dict[str, Tensor], report: LegacyReport) -> None:
    """Today a missing output head means the embeddings; the readers of then wanted it written out."""
    output = legacy_name("output.weight", target.architecture)
    embeddings = legacy_name("token_embd.weight", target.architecture)
    if output is None or embeddings is None or output in tensors or embeddings not in tensors:
        return
    tensors[output] = replace(tensors[embeddings], name=output)
    report.notes.append("the output head shares the embeddings; it is written out a second time")


def _old_type(target: _Target, tensor: Tensor, report: LegacyReport) -> Tensor:
    """The tensor in a type of the target's era."""
    if len(tensor.shape) > 2:
        raise target.refuse(f"{tensor.name} has {len(tensor.shape)} dimensions")
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


# --------------------------------------------------------------------------------------- header


def _number(contents: Contents, key: str) -> int | None:
    """An integer of the model's metadata, if it is there and one for all layers."""
    typed = contents.metadata.get(f"{contents.architecture}.{key}")
    if typed is None:
        return None
    value = typed.value
    if isinstance(value, np.ndarray):
        same = len(value) > 0 and bool((value == value[0]).all())
        return int(value[0]) if same else None
    return int(value) if isinstance(value, (int, float)) else None


def _head(target: _Target, contents: Contents, tensors: dict[str, Tensor], report: LegacyReport) -> bytes:
    """Magic, version, header fields and vocabulary."""
    old = contents.legacy_source
    made = _made_header if old is None else _kept_header
    header = made(target, contents, tensors, report)
    kept = header.get("ftype") if contents.stored is not contents.tensors else None
    header["ftype"] = _ftype(target, kept, tensors)
    out = bytearray(_NUMBERS[target.container])
    if target.version is not None:
        out += struct.pack("<I", target.version)
    for name in HEADERS[target.architecture]:
        if name in FLOATS:
            out += np.float32(header[name]).tobytes()
        elif -(1 << 31) <= header[name] < 1 << 31:
            out += struct.pack("<i", header[name])
        else:
            raise target.refuse(f"its header has 31 bits for {name} = {header[name]}")
    texts, scores = _vocabulary(target, contents, int(header["n_vocab"]))
    for text, score in zip(texts, scores.tolist(), strict=True):
        out += struct.pack("<I", len(text)) + text
        if target.container != "ggml":
            out += struct.pack("<f", score)
    return bytes(out)


def _kept_header(
    target: _Target, contents: Contents, tensors: dict[str, Tensor], report: LegacyReport
) -> dict[str, int | float]:
    """An older file's own header: what GGUF has no key for (n_mult) stays as it was."""
    source = contents.legacy_source
    assert source is not None
    return {name: source.metadata[name] for name in HEADERS[target.architecture]}  # type: ignore[misc]


def _made_header(
    target: _Target, contents: Contents, tensors: dict[str, Tensor], report: LegacyReport
) -> dict[str, int | float]:
    arch = target.architecture
    found = {
        "n_embd": _number(contents, "embedding_length"),
        "n_head": _number(contents, "attention.head_count"),
        "n_layer": _number(contents, "block_count"),
    }
    for name, value in found.items():
        if not value:
            raise target.refuse(f"its header needs one {name} for all layers")
    numbers: dict[str, int | float] = {name: int(value or 0) for name, value in found.items()}
    embeddings = tensors[legacy_name("token_embd.weight", arch) or ""]
    head = int(numbers["n_embd"]) // int(numbers["n_head"])
    numbers["n_vocab"] = numbers["n_vocab_again"] = embeddings.shape[1]
    numbers["n_rot"] = _number(contents, "rope.dimension_count") or head
    numbers["n_ctx"] = numbers["max_seq"] = _number(contents, "context_length") or 2048
    numbers["n_head_kv"] = _number(contents, "attention.head_count_kv") or numbers["n_head"]
    numbers["n_mult"] = _n_mult(contents, numbers, report)
    values = contents.values()
    numbers["use_parallel_residual"] = int(bool(values.get(f"{arch}.use_parallel_residual", True)))
    numbers["alibi_max"] = _float(values.get(f"{arch}.attention.max_alibi_bias"), 8.0)
    numbers["clip_kqv"] = _float(values.get(f"{arch}.attention.clamp_kqv"), 0.0)
    _warn(target, contents, numbers, report)
    _note_dropped(target, contents, report)
    return numbers


def _float(value: object, default: float) -> float:
    return float(value) if isinstance(value, (int, float)) else default


def _n_mult(contents: Contents, numbers: dict[str, int | float], report: LegacyReport) -> int:
    """The n_mult from which llama's readers compute n_ff: 8/3 n_embd rounded up to a multiple of it."""
    n_ff = _number(contents, "feed_forward_length") or 0
    if contents.architecture != "llama":
        return 1
    base = 2 * (4 * int(numbers["n_embd"])) // 3
    if n_ff >= base:
        # n_ff itself always works; 256 is what the models of the time had
        fitting = (256, *(m for m in range(1, n_ff + 1) if n_ff % m == 0))
        return next(m for m in fitting if -(-base // m) * m == n_ff)
    report.notes.append(
        f"n_ff = {n_ff} is less than 8/3 of n_embd: readers that compute it from n_mult will refuse the file"
    )
    return 256


def _warn(target: _Target, contents: Contents, numbers: dict[str, int | float], report: LegacyReport) -> None:
    """Note what the readers of the container cannot know."""
    if target.architecture != "llama":
        return
    head = _number(contents, "attention.key_length")
    if head is not None and head * numbers["n_head"] != numbers["n_embd"]:
        raise target.refuse(f"its readers take n_embd / n_head as the size of a head, here it is {head}")
    if numbers["n_head_kv"] != numbers["n_head"]:
        report.notes.append(
            f"{target.name} has no n_head_kv ({numbers['n_head_kv']} here, {numbers['n_head']} heads): its "
            "readers must be told (n_gqa), those before July 2023 cannot run it"
        )
    values = contents.values()
    base = _float(values.get("llama.rope.freq_base"), 10000.0)
    if base != 10000.0:
        report.notes.append(f"{target.name} has no rope base ({base:g} here): its readers must be told")
    if "llama.rope.scaling.type" in values:
        report.notes.append(f"{target.name} has no rope scaling: its readers must be told")


def _note_dropped(target: _Target, contents: Contents, report: LegacyReport) -> None:
    """Note the metadata that the container has no place for."""
    held = {
        "general.architecture", "general.file_type", "general.quantization_version", "general.alignment",
        "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.scores",
        "tokenizer.ggml.token_type", "tokenizer.ggml.merges",
    }  # fmt: skip
    parts = (
        "block_count", "embedding_length", "feed_forward_length", "attention.head_count",
        "attention.head_count_kv", "attention.key_length", "attention.value_length",
        "rope.dimension_count", "rope.freq_base", "use_parallel_residual", "attention.max_alibi_bias",
        "attention.clamp_kqv", "vocab_size",
    )  # fmt: skip
    held |= {f"{target.architecture}.{part}" for part in parts}
    if "n_ctx" in HEADERS[target.architecture] or "max_seq" in HEADERS[target.architecture]:
        held.add(f"{target.architecture}.context_length")
    dropped = [key for key in contents.metadata if key not in held]
    if dropped:
        report.notes.append(f"{target.name} has no place for {', '.join(sorted(dropped))}")


def _ftype(target: _Target, kept: int | float | None, tensors: dict[str, Tensor]) -> int:
    if kept is not None:
        kind = int(kept) % 1000
    else:
        sizes: dict[int, int] = {}
        for tensor in tensors.values():
            if len(tensor.shape) == 2:
                sizes[tensor.type.number] = sizes.get(tensor.type.number, 0) + tensor.n_elements
        most = max(sizes, key=lambda number: sizes[number]) if sizes else 0
        kind = _FTYPES[most]
    # llama.cpp left the version out, and a reader of its files takes a large number for an unknown type
    return kind if target.architecture == "llama" else kind + 1000 * _VERSION_OF_ERA[target.era]


def _vocabulary(
    target: _Target, contents: Contents, n_vocab: int
) -> tuple[list[bytes], npt.NDArray[np.float32]]:
    values = contents.values()
    source = contents.legacy_source
    if source is not None:
        tokens = source.metadata["tokens"]
        assert isinstance(tokens, StringArray)
        scores = source.metadata.get("scores", values.get("tokenizer.ggml.scores"))
        if scores is None:
            scores = np.zeros(len(tokens), np.float32)
        return list(tokens.raws()), np.asarray(scores, np.float32)
    model = values.get("tokenizer.ggml.model")
    if (target.architecture == "llama") != (model == "llama"):
        raise target.refuse(f"its readers expect another kind of vocabulary than {model!r}")
    try:
        texts, ranks = vocabulary.to_legacy(values)
    except (KeyError, ValueError) as error:
        raise target.refuse(f"its vocabulary: {error}") from None
    if len(texts) > n_vocab:
        raise target.refuse(f"{len(texts)} vocabulary entries, but the embeddings have {n_vocab} rows")
    texts += [b""] * (n_vocab - len(texts))
    return texts, np.append(ranks, np.zeros(n_vocab - len(ranks), np.float32))


# -------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class _Item:
    """One tensor of one file."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    nbytes: int
    load: Callable[[], Bytes]


def _plan(target: _Target, tensors: dict[str, Tensor], n_parts: int) -> list[list[_Item]]:
    """What goes into each file."""
    if n_parts > 1 and (target.container == "ggjt" or target.architecture != "llama"):
        raise InvalidParameterError("n_parts", n_parts, "1 for GGJT and architectures other than llama")
    if n_parts == 1:
        return [[_Item(t.name, t.type, t.shape, t.nbytes, t.load) for t in tensors.values()]]
    return [[_part_of(target, t, i, n_parts) for t in tensors.values()] for i in range(n_parts)]


def _part_of(target: _Target, tensor: Tensor, index: int, n_parts: int) -> _Item:
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


def _write(file: BinaryIO, target: _Target, head: bytes, plan: list[_Item]) -> Iterator[int]:
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
