"""The head of a file of before GGUF: its fields and vocabulary, and what its readers will not know."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llamaherd.errors import UnsupportedFileError
from llamaherd.files import vocabulary
from llamaherd.files.blocks import Rounding
from llamaherd.files.contents import Contents
from llamaherd.files.legacy import FLOATS, HEADERS, MAGICS
from llamaherd.files.model_file import Tensor
from llamaherd.files.names import legacy_name
from llamaherd.files.strings import StringArray

__all__ = ["LegacyReport", "Target", "encode_head", "number"]

_NUMBERS = {name: magic for magic, name in MAGICS.items()}

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
class Target:
    """The file to be written: where, which container and version, which architecture."""

    path: Path
    container: str
    version: int | None
    architecture: str

    @property
    def era(self) -> int:
        """Whose blocks it holds: llama.cpp's files had those of their time, rustformers' today's."""
        if self.container == "ggjt":
            return self.version or 1
        return 1 if self.architecture == "llama" else 3

    def refuse(self, reason: str) -> UnsupportedFileError:
        """The error for a model that the file cannot hold."""
        return UnsupportedFileError(self.path, f"a {self.name} file cannot hold this model: {reason}")

    @property
    def name(self) -> str:
        """As a user would call the container."""
        return self.container.upper() + (f" {self.version}" if self.container == "ggjt" else "")


def number(contents: Contents, key: str) -> int | None:
    """An integer of the model's metadata, if it is there and one for all layers."""
    typed = contents.metadata.get(f"{contents.architecture}.{key}")
    if typed is None:
        return None
    value = typed.value
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        same = len(value) > 0 and bool((value == value[0]).all())
        return int(value[0]) if same else None
    return value if isinstance(value, int) else None


def encode_head(
    target: Target, contents: Contents, tensors: dict[str, Tensor], report: LegacyReport
) -> bytes:
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
    target: Target, contents: Contents, tensors: dict[str, Tensor], report: LegacyReport
) -> dict[str, int | float]:
    """An older file's own header: what GGUF has no key for (n_mult) stays as it was."""
    source = contents.legacy_source
    assert source is not None
    return {name: source.metadata[name] for name in HEADERS[target.architecture]}  # type: ignore[misc]


def _made_header(
    target: Target, contents: Contents, tensors: dict[str, Tensor], report: LegacyReport
) -> dict[str, int | float]:
    arch = target.architecture
    found = {
        "n_embd": number(contents, "embedding_length"),
        "n_head": number(contents, "attention.head_count"),
        "n_layer": number(contents, "block_count"),
    }
    for name, value in found.items():
        if not value:
            raise target.refuse(f"its header needs one {name} for all layers")
    numbers: dict[str, int | float] = {name: int(value or 0) for name, value in found.items()}
    embeddings = tensors.get(legacy_name("token_embd.weight", arch) or "")
    if embeddings is None or len(embeddings.shape) != 2:
        raise target.refuse("it has no token_embd.weight with a row for each token")
    head = int(numbers["n_embd"]) // int(numbers["n_head"])
    numbers["n_vocab"] = numbers["n_vocab_again"] = embeddings.shape[1]
    numbers["n_rot"] = number(contents, "rope.dimension_count") or head
    numbers["n_ctx"] = numbers["max_seq"] = number(contents, "context_length") or 2048
    numbers["n_head_kv"] = number(contents, "attention.head_count_kv") or numbers["n_head"]
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
    n_ff = number(contents, "feed_forward_length") or 0
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


def _warn(target: Target, contents: Contents, numbers: dict[str, int | float], report: LegacyReport) -> None:
    """Note what the readers of the container cannot know."""
    if target.architecture != "llama":
        return
    head = number(contents, "attention.key_length")
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


def _note_dropped(target: Target, contents: Contents, report: LegacyReport) -> None:
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


def _ftype(target: Target, kept: int | float | None, tensors: dict[str, Tensor]) -> int:
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
    target: Target, contents: Contents, n_vocab: int
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
