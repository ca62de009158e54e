"""`Contents`: a model as GGUF would say it, whatever file it came from.

Everything that runs or writes a model goes through here: a GGUF file is passed on as it is; an older file
gets GGUF's names, keys and blocks. Its tensors are repacked only when they are loaded, and not at all
where their blocks are today's: those stay views of the mapped file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llamaherd.errors import MalformedFileError, UnsupportedFileError
from llamaherd.files import vocabulary
from llamaherd.files.block_types import BlockType, block_type
from llamaherd.files.blocks import Rounding, can_repack, encode_floats, repack
from llamaherd.files.metadata import TypedValue, Value, ValueType, to_typed
from llamaherd.files.model_file import Bytes, ModelFile, Tensor
from llamaherd.files.names import gguf_name
from llamaherd.files.strings import StringArray

__all__ = ["Assumptions", "Contents", "contents_of"]

F16, F32 = block_type(1), block_type(0)


@dataclass(frozen=True)
class Assumptions:
    """What files before GGUF do not say. Defaults are those of the readers of their time.

    n_ctx: context length the model was trained for (where the header has none). rms_epsilon: of llama's
    norms; None is 1e-6 for GGML, GGMF, GGJT 1 and 2, and 5e-6 for GGJT 3. rope_base: frequency base
    of rotary positions. norm_epsilon: of LayerNorm in the other architectures.
    """

    n_ctx: int = 2048
    rms_epsilon: float | None = None
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-5


@dataclass
class Contents:
    """A model in GGUF's terms.

    metadata: GGUF keys. tensors: by GGUF names, types as GGUF stores them. stored: the same tensors as the
    source has them (an older era's blocks and order of rows); the same object where nothing differs.
    notes: what a user should know about the translation. roundings: by tensor, filled as tensors are
    loaded. source: the file behind it, None for a model made in memory.
    """

    architecture: str
    metadata: dict[str, TypedValue]
    tensors: dict[str, Tensor]
    stored: dict[str, Tensor]
    source: ModelFile | None = None
    notes: list[str] = field(default_factory=list)
    roundings: dict[str, Rounding] = field(default_factory=dict)

    @classmethod
    def in_memory(cls, metadata: Mapping[str, Value | TypedValue], tensors: Iterable[Tensor]) -> Contents:
        """A model that is in no file, from GGUF metadata and tensors."""
        typed = {key: to_typed(value) for key, value in metadata.items()}
        architecture = typed["general.architecture"].value
        by_name = {tensor.name: tensor for tensor in tensors}
        return cls(str(architecture), typed, by_name, by_name)

    @property
    def legacy_source(self) -> ModelFile | None:
        """The file behind it, if that is one of before GGUF."""
        return self.source if self.source is not None and self.source.container != "gguf" else None

    def values(self) -> dict[str, Value]:
        """The metadata without types."""
        return {key: typed.value for key, typed in self.metadata.items()}


def contents_of(model: ModelFile, *, assume: Assumptions | None = None, exact: bool = False) -> Contents:
    """The model in GGUF's terms.

    Types that GGUF no longer has (q4_2, q4_3) become f16, or f32 with ``exact``.
    Raises UnsupportedFileError for an adapter or an architecture that today's libllama cannot run,
    MalformedFileError for missing or misshapen tensors of an older file.
    """
    if model.container == "gguf":
        kept = {k: v for k, v in model.metadata.typed_items().items() if not k.startswith("split.")}
        tensors = {name: _little_endian(tensor) for name, tensor in model.tensors.items()}
        return Contents(model.architecture or "", kept, tensors, tensors, model)
    return _from_legacy(model, assume or Assumptions(), F32 if exact else F16)


def _little_endian(tensor: Tensor) -> Tensor:
    """The tensor with its bytes turned round, if it comes from a big-endian file."""
    if not tensor.big_endian:
        return tensor
    size = tensor.type.block_bytes
    if tensor.type.block_size != 1:
        raise UnsupportedFileError(
            tensor.name, f"{tensor.type} blocks in big-endian order cannot be turned round; gguf's tools can"
        )

    def load() -> Bytes:
        return np.ascontiguousarray(tensor.raw.reshape(-1, size)[:, ::-1]).reshape(-1)

    return replace(tensor, big_endian=False, offset=None, load=load)


# --------------------------------------------------------------------------------------- legacy


def _from_legacy(model: ModelFile, assume: Assumptions, fallback: BlockType) -> Contents:
    architecture = model.architecture or ""
    if model.container == "ggla":
        raise UnsupportedFileError(model.path, "this is a LoRA adapter, not a model; load it onto its base")
    if architecture == "gptj":
        raise UnsupportedFileError(model.path, "libllama does not run GPT-J; its tensors can only be read")
    contents = Contents(architecture, {}, {}, {}, model)
    for name, tensor in model.tensors.items():
        if name.endswith(("rotary_emb.inv_freq", "inner_attention.rope.freqs")):
            continue  # computed by every reader since
        new = gguf_name(name, architecture)
        if new is None:
            raise UnsupportedFileError(model.path, f"tensor {name!r} has no place in a {architecture} model")
        contents.stored[new] = replace(tensor, name=new)
        contents.tensors[new] = _modern(contents.stored[new], contents, fallback)
    header = {key: model.metadata[key] for key in model.metadata}
    contents.metadata.update(_metadata(model, header, contents, assume))
    n_embd, n_head = int(header["n_embd"]), int(header["n_head"])  # type: ignore[arg-type]
    n_kv = int(header["n_head_kv"]) if architecture == "falcon" else n_head  # type: ignore[arg-type]
    reorder_attention(contents.tensors, architecture, n_embd, n_head, n_kv)
    return contents


def _modern(tensor: Tensor, contents: Contents, fallback: BlockType) -> Tensor:
    """The tensor with a type GGUF has; the same view of the file if it has one already."""
    if tensor.type.era == 3:
        return tensor
    target = block_type(tensor.type.number)
    if can_repack(tensor.type, target):
        return replace(tensor, type=target, nbytes=target.nbytes(tensor.shape), offset=None,
                       load=_repacking(tensor, target, contents))  # fmt: skip
    contents.notes.append(f"{tensor.name}: {tensor.type.name} is no type of GGUF; it becomes {fallback}")

    def load() -> Bytes:
        try:
            raw, rounding = encode_floats(tensor.dequantize().reshape(-1), fallback)
        except ValueError as error:
            raise MalformedFileError(tensor.name, f"a weight does not fit {fallback}: {error}") from None
        contents.roundings[tensor.name] = rounding
        return raw

    return replace(tensor, type=fallback, nbytes=fallback.nbytes(tensor.shape), offset=None, load=load)


def _repacking(tensor: Tensor, target: BlockType, contents: Contents) -> Callable[[], Bytes]:
    def load() -> Bytes:
        try:
            raw, rounding = repack(tensor.raw, tensor.type, target)
        except ValueError as error:
            raise MalformedFileError(tensor.name, str(error)) from None
        contents.roundings[tensor.name] = rounding
        return raw

    return load


def _path(contents: Contents) -> Path:
    return contents.source.path if contents.source is not None else Path("model")


def _shape(contents: Contents, name: str, axis: int) -> int:
    """One side of a tensor that the header leaves to the tensors to say."""
    tensor = contents.tensors.get(name)
    if tensor is None or axis >= len(tensor.shape):
        raise MalformedFileError(_path(contents), f"the model has no tensor for GGUF's {name}")
    return tensor.shape[axis]


def _metadata(
    model: ModelFile, header: Mapping[str, Value], contents: Contents, assume: Assumptions
) -> dict[str, TypedValue]:
    arch = contents.architecture
    number = {key: value for key, value in header.items() if isinstance(value, int)}
    u32: dict[str, int] = {
        "block_count": number["n_layer"],
        "embedding_length": number["n_embd"],
        "feed_forward_length": _shape(contents, f"blk.0.ffn_{'gate' if arch == 'llama' else 'up'}.weight", 1),
        "attention.head_count": number["n_head"],
        "context_length": number.get("n_ctx", number.get("max_seq", assume.n_ctx)),
    }
    f32: dict[str, float] = {}
    out: dict[str, TypedValue] = {"general.architecture": TypedValue(ValueType.STRING, arch)}
    if arch == "llama":
        head = number["n_embd"] // number["n_head"]
        u32["attention.head_count_kv"] = _shape(contents, "blk.0.attn_k.weight", 1) // max(head, 1)
        u32["rope.dimension_count"] = number["n_rot"]
        f32["rope.freq_base"] = assume.rope_base
        usual = 5e-6 if (model.container, model.version) == ("ggjt", 3) else 1e-6
        epsilon = usual if assume.rms_epsilon is None else assume.rms_epsilon
        f32["attention.layer_norm_rms_epsilon"] = epsilon
    else:
        f32["attention.layer_norm_epsilon"] = assume.norm_epsilon
    if arch == "gptneox":
        u32["rope.dimension_count"] = number["n_rot"]
        parallel = number["use_parallel_residual"] != 0
        out[f"{arch}.use_parallel_residual"] = TypedValue(ValueType.BOOL, parallel)
    if arch == "falcon":
        u32["attention.head_count_kv"] = number["n_head_kv"]
    if arch == "mpt":
        f32["attention.max_alibi_bias"] = float(header["alibi_max"])  # type: ignore[arg-type]
        f32["attention.clamp_kqv"] = float(header["clip_kqv"])  # type: ignore[arg-type]
    if arch == "bloom":
        f32["attention.max_alibi_bias"] = 8.0
    for key, value in u32.items():
        if not 0 <= value < 1 << 32:
            raise MalformedFileError(model.path, f"the header says {key} = {value}")
        out[f"{arch}.{key}"] = TypedValue(ValueType.UINT32, value)
    out |= {f"{arch}.{key}": TypedValue(ValueType.FLOAT32, value) for key, value in f32.items()}
    kind = number["ftype"] % 1000
    out["general.file_type"] = TypedValue(ValueType.UINT32, 1 if kind in (5, 6) else kind)  # q4_2, q4_3: f16
    out["general.quantization_version"] = TypedValue(ValueType.UINT32, 2)
    tokens, scores = header["tokens"], header.get("scores")
    assert isinstance(tokens, StringArray)
    if scores is None and arch == "llama":
        contents.notes.append("the vocabulary has no scores; entries are ranked by their number")
    values = scores if isinstance(scores, np.ndarray) else None
    out |= vocabulary.from_legacy(tokens, values, arch)
    return out


# ------------------------------------------------------------------------------------ attention


def attention_rows(
    architecture: str, n_embd: int, n_head: int, n_head_kv: int
) -> npt.NDArray[np.int64] | None:
    """For each row of GGUF's fused attn_qkv, the row of the older file's; None where they are the same.

    gptneox keeps q, k and v of one head together, falcon those of one group of heads; GGUF has all
    of q, then all of k, then all of v (llama.cpp's conversion/gptneox.py and falcon.py).
    """
    head = n_embd // n_head
    if architecture == "gptneox":
        rows: npt.NDArray[np.int64] = np.arange(3 * n_embd).reshape(n_head, 3, head)
        return np.ascontiguousarray(rows.transpose(1, 0, 2)).reshape(-1)
    if architecture == "falcon" and n_head_kv > 1:
        per_group = n_head // n_head_kv
        rows = np.arange((n_head + 2 * n_head_kv) * head).reshape(n_head_kv, per_group + 2, head)
        order = [rows[:, :-2].ravel(), rows[:, -2].ravel(), rows[:, -1].ravel()]
        return np.concatenate(order).astype(np.int64)
    return None


def reorder_attention(
    tensors: dict[str, Tensor],
    architecture: str,
    n_embd: int,
    n_head: int,
    n_head_kv: int,
    *,
    back: bool = False,
) -> None:
    """Put every attn_qkv among ``tensors`` into GGUF's order of rows, or ``back`` into the older file's.

    Blocks stay whole. Raises MalformedFileError where the rows are not what the heads need.
    """
    found = [name for name in tensors if ".attn_qkv." in name]
    if not found or architecture not in ("gptneox", "falcon"):
        return
    if min(n_embd, n_head, n_head_kv) <= 0 or n_embd % n_head or n_head % n_head_kv:
        raise MalformedFileError(
            found[0], f"n_embd = {n_embd}, n_head = {n_head} and n_head_kv = {n_head_kv} do not fit"
        )
    count = (n_head + 2 * n_head_kv) * (n_embd // n_head)
    for name in found:  # before anything of that size is made
        if tensors[name].shape[-1] != count:
            raise MalformedFileError(
                name, f"has {tensors[name].shape[-1]} rows, {n_head} heads of {n_embd // n_head} need {count}"
            )
    rows = attention_rows(architecture, n_embd, n_head, n_head_kv)
    if rows is None:
        return
    order = np.argsort(rows) if back else rows
    for name in found:
        tensors[name] = _reordered(tensors[name], order)


def _reordered(tensor: Tensor, rows: npt.NDArray[np.int64]) -> Tensor:
    return replace(tensor, offset=None, load=lambda: tensor.raw.reshape(len(rows), -1)[rows].reshape(-1))
