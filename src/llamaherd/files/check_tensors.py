"""The part of `check` that compares a model's tensors with what its hyperparameters announce."""

from __future__ import annotations

import numpy as np

from llamaherd.files.architectures import ARCHITECTURES, Architecture, Shape
from llamaherd.files.contents import Contents
from llamaherd.files.faults import Faults
from llamaherd.files.names import layer_of

__all__ = ["check_tensors"]

_NOT_WEIGHTS = frozenset({24, 25, 27, 28})  # i8, i16, i64, f64: no kernel computes with them
_WHOLE_HEADS = frozenset({"llama", "falcon"})  # libllama: the whole head is rotated
_MAX_LAYERS = 512
_MAX_LISTED = 8


def check_tensors(contents: Contents, faults: Faults) -> None:
    """Report layers without tensors, tensors that are missing or of another shape than libllama wants."""
    for name, tensor in contents.tensors.items():
        if tensor.type.number in _NOT_WEIGHTS:
            faults.error(name, f"weights of type {tensor.type} cannot be computed with")
    if _check_layers(contents, faults):
        _check_shapes(contents, faults)


def _number(contents: Contents, part: str) -> int | None:
    """A hyperparameter that is one positive number, or the same for all layers."""
    typed = contents.metadata.get(f"{contents.architecture}.{part}")
    if typed is None:
        return None
    value = typed.value
    if (
        isinstance(value, np.ndarray)
        and value.dtype.kind in "iu"
        and len(value)
        and (value == value[0]).all()
    ):
        value = int(value[0])
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _check_layers(contents: Contents, faults: Faults) -> bool:
    """Whether there are tensors of exactly the layers that there should be."""
    n_layer = _number(contents, "block_count")
    if n_layer is None or n_layer > _MAX_LAYERS:
        return False
    layers = {layer for name in contents.tensors if (layer := layer_of(name)) is not None}
    missing = [i for i in range(n_layer) if i not in layers]
    beyond = sorted(i for i in layers if i >= n_layer)
    if missing:
        faults.error("file", f"layers {_ranges(missing)} of {n_layer} have no tensors")
    if beyond:
        faults.error("file", f"there are tensors of layers {_ranges(beyond)}, the model has {n_layer}")
    return not missing and not beyond


def _ranges(numbers: list[int]) -> str:
    """3, 5-7 for [3, 5, 6, 7]."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    shown = ", ".join("-".join(map(str, run)) for run in runs[:_MAX_LISTED])
    return shown if len(runs) <= _MAX_LISTED else f"{shown}, ..."


def _known(contents: Contents) -> Architecture | None:
    """Our table's row for the model, if it has one that lists the usual weights."""
    experts = _number(contents, "expert_count") is not None
    for row in ARCHITECTURES.values():
        if row.gguf == contents.architecture and row.weights is None and (row.ffn == "experts") == experts:
            return row
    return None


def _shape(contents: Contents, row: Architecture) -> Shape | None:
    """The sizes that the hyperparameters announce; None where they differ from layer to layer."""
    numbers = {
        part: _number(contents, part)
        for part in ("block_count", "embedding_length", "attention.head_count", "feed_forward_length")
    }
    embeddings = contents.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2 or any(value is None for value in numbers.values()):
        return None
    n_embd, n_heads = numbers["embedding_length"] or 0, numbers["attention.head_count"] or 1
    head = _number(contents, "attention.key_length") or n_embd // n_heads
    if (_number(contents, "attention.value_length") or head) != head or head == 0:
        return None
    kv = f"{contents.architecture}.attention.head_count_kv"
    n_kv_heads = _number(contents, "attention.head_count_kv") if kv in contents.metadata else n_heads
    if n_kv_heads is None:
        return None
    return Shape(
        layers=numbers["block_count"] or 0,
        n_embd=n_embd,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        n_head=head,
        n_rot=_number(contents, "rope.dimension_count") or head,
        n_ff=numbers["feed_forward_length"] or 0,
        n_vocab=embeddings.shape[1],
        n_ctx=_number(contents, "context_length") or 0,
        n_experts=_number(contents, "expert_count") or 0,
        n_experts_used=_number(contents, "expert_used_count") or 0,
        sliding_window=0,
    )


def _check_shapes(contents: Contents, faults: Faults) -> None:
    """Missing and misshapen tensors, for architectures whose weights we have in a table."""
    row = _known(contents)
    if row is None:
        return
    epsilon = f"{row.gguf}.attention.layer_norm_{'rms_' if row.norm == 'rms' else ''}epsilon"
    if epsilon not in contents.metadata:
        faults.error(epsilon, "is missing")
    if "token_embd.weight" not in contents.tensors:
        faults.error("token_embd.weight", "the tensor is missing")
    for part in ("attention.head_count", "feed_forward_length"):
        if f"{row.gguf}.{part}" not in contents.metadata:
            faults.error(f"{row.gguf}.{part}", "is missing")
    shape = _shape(contents, row)
    if shape is None:
        return
    if row.gguf in _WHOLE_HEADS and shape.n_rot != shape.n_head:
        faults.error(f"{row.gguf}.rope.dimension_count", f"is {shape.n_rot}, a head has {shape.n_head}")
    wanted = {weight.name: weight.shape for weight in row.list_weights(shape, tied=row.head != "own")}
    wanted_if_there = {weight.name: weight.shape for weight in row.list_weights(shape, tied=False)}
    for name in wanted:
        # biases are optional almost everywhere
        if name.endswith(".weight") and name not in contents.tensors and not _has_fused(contents, name):
            faults.error(name, "the tensor is missing")
    if row.ffn == "experts":
        return  # an expert's n_ff has several keys
    for name, size in wanted_if_there.items():
        tensor = contents.tensors.get(name)
        if tensor is not None and _trimmed(tensor.shape) != _trimmed(size):
            faults.error(name, f"has shape {tensor.shape}, the hyperparameters need {size}")


def _has_fused(contents: Contents, name: str) -> bool:
    """Whether the weight is part of another: q, k and v may be one tensor, or three, in any architecture."""
    for part in (".attn_q.", ".attn_k.", ".attn_v."):
        if part in name:
            return name.replace(part, ".attn_qkv.") in contents.tensors
    return ".attn_qkv." in name and name.replace(".attn_qkv.", ".attn_q.") in contents.tensors


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without trailing ones, which mean nothing."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape
