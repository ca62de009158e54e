"""Tiny random models of any supported architecture, valid and talkative, for tests and for trying things.

The weights are random but scaled so that a model behaves: attention prefers some tokens, layers outweigh
the embedding, logits spread over several units; so greedy text neither sticks to a token nor is NaN.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llamaherd.errors import InvalidParameterError
from llamaherd.files.architectures import architecture_named
from llamaherd.files.block_types import BlockType, block_type, named_type
from llamaherd.files.blueprint import Architecture, Role, Shape, Weight
from llamaherd.files.metadata import TypedValue, Value, ValueType
from llamaherd.files.model_file import Tensor
from llamaherd.files.tiny_vocabulary import BYTE, CHATML, NORMAL, TinyVocabulary, tiny_vocabulary
from llamaherd.files.writer import write_gguf

__all__ = ["DEFECTS", "TYPES", "TinyModel", "make_tiny_model", "synthesize"]

Floats = npt.NDArray[np.float32]

DEFECTS = ("duplicate-token", "nan-weights")
"""What can be broken on purpose: two vocabulary entries of one text; NaN in the first layer."""

# llama_ftype of a file whose matrices are mostly of a type
_FILE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "bf16": 32,
    "tq1_0": 36, "tq2_0": 37, "mxfp4": 38,
}  # fmt: skip

TYPES = tuple(_FILE_TYPES)
"""What the matrices may be: types with a reference quantiser."""

_QUANTISED = {Role.EMBEDDING, Role.HEAD, Role.MATRIX, Role.SHARP, Role.RESIDUAL}

_SHARPNESS = 2.0  # of queries and of keys: attention picks a few tokens, else history would average out
_GAINS = {Role.MATRIX: 1.2, Role.SHARP: _SHARPNESS, Role.RESIDUAL: 2.0, Role.ROUTER: 1.0}

_INPUT = 0.4  # the embedding's size where it enters the first layer; layers add about 1 to 2
_LOGITS = 2.5  # standard deviation of the logits
_NORMS = {Role.NORM: 1.0, Role.SHARP_NORM: _SHARPNESS}


@dataclass(frozen=True)
class TinyModel:
    """A model in memory: GGUF metadata and tensors, for a writer of any container."""

    architecture: str
    metadata: dict[str, Value | TypedValue]
    tensors: list[Tensor]
    vocabulary: TinyVocabulary


def synthesize(
    path: str | os.PathLike[str],
    architecture: str = "llama",
    *,
    split_size: int | None = None,
    **options: Any,
) -> Path:
    """Write a tiny random model as GGUF and return its path (of the first file, if split).

    ``options`` are those of `make_tiny_model`. Equal arguments give equal files, byte for byte.
    """
    model = make_tiny_model(architecture, **options)
    return write_gguf(path, model.metadata, model.tensors, split_size=split_size, sync=False)[0]


def make_tiny_model(
    architecture: str = "llama",
    *,
    layers: int = 2,
    n_embd: int = 64,
    n_heads: int = 4,
    n_kv_heads: int | None = None,
    n_vocab: int | None = None,
    n_ctx: int = 512,
    n_ff: int | None = None,
    n_experts: int = 4,
    n_experts_used: int = 2,
    sliding_window: int = 32,
    type: str = "f32",
    tokenizer: str | None = None,
    bos: bool = True,
    tied: bool | None = None,
    chat_template: str | None = CHATML,
    name: str | None = None,
    seed: int = 0,
    defects: Collection[str] = (),
) -> TinyModel:
    """Make a tiny random model in memory.

    architecture: a name of ``ARCHITECTURES``. type: of the matrices ("f32", "f16", "bf16", "q8_0",
    "q4_0", ...: those with a reference quantiser in the gguf package); rows that are not whole blocks
    are f16, norms and biases f32. n_kv_heads: half of n_heads by default where the architecture can.
    n_ff: 2 * n_embd by default. n_vocab: 320 (bpe) or 448 (spm) by default. tokenizer: "bpe", "spm",
    "wpm" or "ugm"; the architecture's usual one by default. bos=False: no BOS token. tied: the head is the
    token embedding (default: only where it must). sliding_window: in tokens, where the architecture
    has one. defects: names from ``DEFECTS``. Raises InvalidParameterError naming what does not fit.
    """
    row = architecture_named(architecture)
    block = _block_type(type)
    _check_defects(defects)
    vocabulary = tiny_vocabulary(tokenizer or row.tokenizer, n_vocab, bos=bos)
    shape = _shape(
        row, layers=layers, n_embd=n_embd, n_heads=n_heads, n_kv_heads=n_kv_heads, n_ff=n_ff, n_ctx=n_ctx,
        n_vocab=len(vocabulary), n_experts=n_experts, n_experts_used=n_experts_used,
        sliding_window=sliding_window,
    )  # fmt: skip
    tied = _settle_head(row, tied)
    if "duplicate-token" in defects:
        vocabulary.tokens[300 % len(vocabulary)] = vocabulary.tokens[299 % len(vocabulary)]
    metadata: dict[str, Value | TypedValue] = {
        "general.architecture": row.gguf,
        "general.name": name or f"tiny random {row.name}",
        "general.file_type": _FILE_TYPES[type],
        **row.hyperparameters(shape),
        **_tokenizer_metadata(vocabulary, chat_template),
    }
    dice = _Dice(row, shape, vocabulary, tied, seed)
    tensors = [_tensor(weight, dice.roll(weight), block) for weight in row.list_weights(shape, tied)]
    if "nan-weights" in defects:
        tensors = _with_nan(tensors)
    return TinyModel(row.name, metadata, tensors, vocabulary)


def _block_type(name: str) -> BlockType:
    if name not in _FILE_TYPES:
        hint = "; for others convert an f32 file" if name.startswith(("q", "iq")) else ""
        raise InvalidParameterError("type", name, f"one of {', '.join(_FILE_TYPES)}{hint}")
    return named_type(name)


def _check_defects(defects: Collection[str]) -> None:
    for defect in defects:
        if defect not in DEFECTS:
            raise InvalidParameterError("defects", defect, f"among {', '.join(DEFECTS)}")


def _settle_head(row: Architecture, tied: bool | None) -> bool:
    """Whether the head is the token embedding; refused where the architecture leaves no choice."""
    if row.head == "either":
        return bool(tied)
    must = row.head in ("tied", "none")
    if tied is not None and tied != must:
        raise InvalidParameterError("tied", tied, f"{must} for {row.name}, which knows nothing else")
    return must


def _shape(
    row: Architecture, *, layers: int, n_embd: int, n_heads: int, n_kv_heads: int | None, n_ff: int | None,
    **rest: int,
) -> Shape:  # fmt: skip
    given = {"layers": layers, "n_embd": n_embd, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "n_ff": n_ff}
    for key, value in {**given, **rest}.items():
        if value is not None and value < 1:
            raise InvalidParameterError(key, value, "at least 1")
    if n_embd % n_heads:
        raise InvalidParameterError("n_embd", n_embd, f"a multiple of n_heads = {n_heads}")
    if n_kv_heads is None:
        n_kv_heads = n_heads // 2 if row.grouped_heads and n_heads % 2 == 0 else n_heads
    if n_heads % n_kv_heads or (n_kv_heads != n_heads and not row.grouped_heads):
        limit = f"a divisor of n_heads = {n_heads}" if row.grouped_heads else f"n_heads = {n_heads}"
        raise InvalidParameterError("n_kv_heads", n_kv_heads, f"{limit} for {row.name}")
    if rest["n_experts_used"] > rest["n_experts"]:
        raise InvalidParameterError("n_experts_used", rest["n_experts_used"], "at most n_experts")
    n_head = row.head_size or n_embd // n_heads
    if row.positions == "rope" and n_head % 4:
        raise InvalidParameterError("n_embd", n_embd, "a multiple of 4 * n_heads, as heads are rotated")
    return Shape(
        layers=layers, n_embd=n_embd, n_heads=n_heads, n_kv_heads=n_kv_heads, n_head=n_head,
        n_rot=int(n_head * row.rotary), n_ff=n_ff or 2 * n_embd, **rest,
    )  # fmt: skip


def _tokenizer_metadata(
    vocabulary: TinyVocabulary, chat_template: str | None
) -> dict[str, Value | TypedValue]:
    ggml = "tokenizer.ggml."
    keys: dict[str, Value | TypedValue] = {f"{ggml}model": vocabulary.model}
    if vocabulary.pre is not None:
        keys[f"{ggml}pre"] = vocabulary.pre
    keys[f"{ggml}tokens"] = vocabulary.tokens
    keys[f"{ggml}token_type"] = np.array(vocabulary.types, np.int32)
    if vocabulary.scores is not None:
        keys[f"{ggml}scores"] = np.array(vocabulary.scores, np.float32)
    if vocabulary.merges is not None:
        keys[f"{ggml}merges"] = TypedValue(ValueType.ARRAY, vocabulary.merges, ValueType.STRING)
    if vocabulary.model == "bert":
        keys[f"{ggml}token_type_count"] = 2
    for special, token in vocabulary.special.items():
        keys[f"{ggml}{special}_token_id"] = token
    for flag, value in vocabulary.flags.items():
        keys[f"{ggml}{flag}"] = value
    if chat_template is not None and "eot" in vocabulary.special:
        keys["tokenizer.chat_template"] = chat_template
    return keys


class _Dice:
    """Random values for each weight: seeded by its name, so that models that share a weight's name do too."""

    def __init__(self, row: Architecture, shape: Shape, vocabulary: TinyVocabulary, tied: bool, seed: int):
        self._seed = seed
        self._tied = tied
        entering = _INPUT / 2 if tied else _INPUT  # a tied head favours the token that came in
        self._embedding = entering / shape.n_embd**0.5 if row.scaled_embedding else entering
        self._head = _LOGITS / shape.n_embd**0.5
        types = np.array(vocabulary.types)
        # control tokens are rarely the likeliest, so that text does not end at once
        self._quiet = np.flatnonzero((types != NORMAL) & (types != BYTE))

    def roll(self, weight: Weight) -> Floats:
        """Values of ``weight`` in numpy's order (rows first)."""
        rng = np.random.default_rng((self._seed, zlib.crc32(weight.name.encode())))
        values: Floats = rng.standard_normal(weight.shape[::-1], np.float32)
        self._scale(weight, values)
        return values

    def _scale(self, weight: Weight, values: Floats) -> None:
        role = weight.role
        if role is Role.RESIDUAL:  # a mean activation would add the same vector to every token
            values -= values.mean(axis=-1, keepdims=True)
        if role in _GAINS:
            values *= _GAINS[role] / weight.shape[0] ** 0.5
        elif role in (Role.EMBEDDING, Role.HEAD):
            values *= self._embedding if role is Role.EMBEDDING else self._head
            values[self._quiet] *= 0.1
        elif role in _NORMS:
            values *= 0.1
            values += 1
            values *= _NORMS[role]
        elif role is Role.OUTPUT_NORM:
            values *= 0.1
            values += 1
            values *= self._head / self._embedding if self._tied else 1
        elif role is Role.DECAY:
            np.exp(values, out=values)
            values *= -1
        else:
            values *= {Role.BIAS: 0.1, Role.TABLE: 0.3, Role.CONVOLUTION: 0.5}[role]


def _tensor(weight: Weight, values: Floats, block: BlockType) -> Tensor:
    if weight.role not in _QUANTISED or block.name == "f32":
        return Tensor.from_bytes(weight.name, block_type(0), weight.shape, values)
    if weight.shape[0] % block.block_size:
        block = named_type("f16")
    return Tensor.from_bytes(weight.name, block, weight.shape, _encode(values, block))


def _encode(values: Floats, block: BlockType) -> npt.NDArray[Any]:
    """``values`` (rows first) in ``block``'s layout, by the gguf package's reference quantisers."""
    if block.name == "f16":
        return values.astype(np.float16)
    from gguf import GGMLQuantizationType  # half of this module's import time, and f32 needs none of it
    from gguf.quants import quantize

    encoded: npt.NDArray[Any] = quantize(values, GGMLQuantizationType(block.number))
    return encoded


def _with_nan(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, with NaN in the first norm (or, failing that, the first f32 weight)."""
    floats = [tensor for tensor in tensors if tensor.type.name == "f32"]
    norms = [tensor for tensor in floats if "norm" in tensor.name]
    victim = (norms or floats)[0]
    values = victim.raw.view(np.float32).copy()
    values[: max(len(values) // 2, 1)] = np.nan
    broken = Tensor.from_bytes(victim.name, victim.type, victim.shape, values)
    return [broken if tensor is victim else tensor for tensor in tensors]
