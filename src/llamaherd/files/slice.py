"""Cut a model by layers: layers [start, end) as a GGUF that loads in stock llama.cpp.

A chain of slices computes exactly what the whole does: the first takes tokens, each gives the hidden state
after its last layer (``l_out-{n - 1}`` in llama.cpp's graph) to the next one's ``llama_batch.embd``,
the last gives logits. Bit for bit, as every operation sees the same numbers in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llamaherd.errors import InvalidParameterError, UnsupportedFileError
from llamaherd.files.block_types import BlockType, block_type, named_type
from llamaherd.files.cut_rules import (
    CUT_RULES,
    OVERWRITTEN_INPUT,
    UNCUTTABLE,
    CutRule,
    nearest_starts,
    window_pattern,
)
from llamaherd.files.layers import BLOCK, count_layers
from llamaherd.files.metadata import Metadata, TypedValue, ValueType
from llamaherd.files.model_file import ModelFile, Tensor
from llamaherd.files.writer import Progress, write_gguf

__all__ = ["SlicePlan", "check_cut", "plan_slice", "slice_model"]

_MIDDLE_VOCABULARY = 32  # entries of a slice that needs none; llama.cpp wants some
# arrays under the architecture's prefix that are not one value a layer, whatever their length
_NOT_PER_LAYER = ("rope.dimension_sections", "rope.scaling", "classifier.output_labels")


@dataclass(frozen=True)
class SlicePlan:
    """Layers [start, end) of ``layers``: metadata and tensors of the slice, ready to be written.

    ``nbytes`` is the size of its tensors. Tensors that the slice only needs for llama.cpp's loader are
    zeros of the smallest type, made when they are written.
    """

    start: int
    end: int
    layers: int
    metadata: dict[str, TypedValue]
    tensors: list[Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def slice_model(
    model: ModelFile,
    start: int,
    end: int,
    path: str | os.PathLike[str],
    *,
    unlisted: bool = False,
    overwrite_input: bool = False,
    split_size: int | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Write layers [start, end) of ``model`` as GGUF and return the files' paths.

    Raises what `plan_slice` and `write_gguf` raise.
    """
    plan = plan_slice(model, start, end, unlisted=unlisted, overwrite_input=overwrite_input)
    return write_gguf(
        path, plan.metadata, plan.tensors, alignment=model.alignment, split_size=split_size, progress=progress
    )


def check_cut(
    model: ModelFile, start: int, end: int, *, unlisted: bool = False, overwrite_input: bool = False
) -> CutRule:
    """Raise if layers [start, end) of ``model`` cannot be a slice that is right; return what it must mind.

    InvalidParameterError: the range is empty, outside the model, or breaks a pattern by layer index (the
    message names the nearest cuts). UnsupportedFileError, with the reason: not GGUF, an architecture
    that cannot be cut, or one that is not known to be cuttable; ``unlisted`` allows the latter, at the
    caller's risk. ``overwrite_input`` allows those of `OVERWRITTEN_INPUT`, for a caller that does as said
    there; their slices name the node under ``llamaherd.slice.input_node``.
    """
    if model.container != "gguf":
        raise UnsupportedFileError(
            model.path, f"only GGUF can be sliced, not {model.container}; convert it first"
        )
    architecture = str(model.architecture)
    special = OVERWRITTEN_INPUT.get(architecture) if overwrite_input else None
    if architecture in UNCUTTABLE and special is None:
        raise UnsupportedFileError(model.path, f"{architecture} cannot be cut: {UNCUTTABLE[architecture]}")
    if architecture not in CUT_RULES and special is None and not unlisted:
        raise UnsupportedFileError(
            model.path,
            f"{architecture} is not among the architectures known to be cut exactly "
            f"({', '.join(sorted(CUT_RULES))})",
        )
    layers = count_layers(model)
    for name, value in (("start", start), ("end", end)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidParameterError(name, value, f"a layer's number, to {layers}")
    if not 0 <= start < layers:
        raise InvalidParameterError("start", start, f"a layer from 0 to {layers - 1}")
    if not start < end <= layers:
        raise InvalidParameterError("end", end, f"after {start} and at most {layers}")
    rule = special or CUT_RULES.get(architecture, CutRule())
    _check_model(model, architecture, rule, layers, end - start)
    if start % rule.period:
        near = nearest_starts(rule.period, start, layers)
        raise InvalidParameterError(
            "start",
            start,
            f"a multiple of {rule.period}, as the layers of {architecture} follow a pattern of that length; "
            f"try {' or '.join(map(str, near))}",
        )
    return rule


def _check_model(model: ModelFile, architecture: str, rule: CutRule, layers: int, part: int) -> None:
    """Refuse what depends on this model's metadata and not only on its architecture."""
    metadata = model.metadata
    reason = rule.refuse(metadata, layers, part)
    if _any(metadata, f"{architecture}.nextn_predict_layers"):
        reason = "it has layers that predict further tokens, which need the whole model"
    if _any(metadata, f"{architecture}.attention.shared_kv_layers"):
        reason = "its last layers use the KV cache of earlier ones"
    if metadata.get("llamaherd.slice.start") is not None:
        reason = "it is a slice already; cut the whole model"
    if "token_embd_norm.weight" in model.tensors and rule.input_node is None:
        reason = UNCUTTABLE["bloom"]
    for name in ("token_embd.weight", "output.weight"):
        tensor = model.tensors.get(name)
        if tensor is not None and len(tensor.shape) != 2:
            reason = f"{name} has {len(tensor.shape)} dimensions where llama.cpp expects 2"
    if reason is not None:
        raise UnsupportedFileError(model.path, f"cannot be cut into {part} of {layers} layers: {reason}")


def _any(metadata: Metadata, key: str) -> bool:
    """Whether a number, or one of an array's, is not zero."""
    return bool(np.any(np.asarray(metadata.get(key, 0)) != 0))


def plan_slice(
    model: ModelFile, start: int, end: int, *, unlisted: bool = False, overwrite_input: bool = False
) -> SlicePlan:
    """What a slice of layers [start, end) holds; nothing is read or written. Raises what `check_cut` does."""
    rule = check_cut(model, start, end, unlisted=unlisted, overwrite_input=overwrite_input)
    layers = count_layers(model)
    metadata = _slice_metadata(model, rule, start, end, layers)
    tensors = list(_slice_tensors(model, start, end, layers))
    return SlicePlan(start, end, layers, metadata, tensors)


# --------------------------------------------------------------------------------------- metadata


def _slice_metadata(
    model: ModelFile, rule: CutRule, start: int, end: int, layers: int
) -> dict[str, TypedValue]:
    prefix = f"{model.architecture}."
    middle = start > 0 and end < layers
    kept: dict[str, TypedValue] = {}
    for key in model.metadata:
        if key.startswith("split.") or (middle and key.startswith("tokenizer.")):
            continue
        value = model.metadata.typed(key)
        kept[key] = _cut_array(value, start, end, layers) if _per_layer(key, prefix) else value
    kept[f"{prefix}block_count"] = TypedValue(ValueType.UINT32, end - start)
    for key, value in rule.defaults(layers).items():
        kept.setdefault(prefix + key, value)
    _state_windows(model.metadata, rule, kept, prefix, start, end, layers)
    if rule.input_scale and start > 0:
        kept[f"{prefix}embedding_scale"] = TypedValue(ValueType.FLOAT32, 1.0)
    dense = model.metadata.get(f"{prefix}leading_dense_block_count")
    if isinstance(dense, int):
        left = min(max(dense - start, 0), end - start)
        kept[f"{prefix}leading_dense_block_count"] = TypedValue(ValueType.UINT32, left)
    if middle:
        kept["tokenizer.ggml.model"] = TypedValue(ValueType.STRING, "none")
        kept[f"{prefix}vocab_size"] = TypedValue(ValueType.UINT32, _MIDDLE_VOCABULARY)
    if rule.input_node is not None and start > 0:
        kept["llamaherd.slice.input_node"] = TypedValue(ValueType.STRING, rule.input_node)
    for key, number in (("start", start), ("end", end), ("layers", layers)):
        kept[f"llamaherd.slice.{key}"] = TypedValue(ValueType.UINT32, number)
    return kept


def _per_layer(key: str, prefix: str) -> bool:
    return key.startswith(prefix) and not key.removeprefix(prefix).startswith(_NOT_PER_LAYER)


def _cut_array(value: TypedValue, start: int, end: int, layers: int) -> TypedValue:
    """One value a layer: those of the slice. Anything else is as it was."""
    items: Any = value.value
    if value.type is not ValueType.ARRAY or len(items) != layers:
        return value
    return TypedValue(value.type, items[start:end], value.element_type)


def _state_windows(
    metadata: Metadata,
    rule: CutRule,
    kept: dict[str, TypedValue],
    prefix: str,
    start: int,
    end: int,
    layers: int,
) -> None:
    """Write out which layers of the slice have a sliding window, where llama.cpp would follow a pattern."""
    key = f"{prefix}attention.sliding_window_pattern"
    pattern = window_pattern(rule, metadata, key, layers)
    if pattern is not None and f"{prefix}attention.sliding_window" in metadata:
        flags = np.array(pattern[start:end], np.bool_)
        kept[key] = TypedValue(ValueType.ARRAY, flags, ValueType.BOOL)


# ---------------------------------------------------------------------------------------- tensors


def _slice_tensors(model: ModelFile, start: int, end: int, layers: int) -> Iterator[Tensor]:
    """The slice's tensors in the file's order: its own layers renumbered from 0, and the global ones."""
    first, last = start == 0, end == layers
    tied = "output.weight" not in model.tensors
    for tensor in model.tensors.values():
        block = BLOCK.fullmatch(tensor.name)
        if block is not None:
            layer = int(block[1])
            if start <= layer < end:
                yield _renamed(tensor, f"blk.{layer - start}.{block[2]}")
        elif tensor.name == "token_embd.weight":
            yield tensor if first or (last and tied) else _stand_in(tensor, last)
        elif tensor.name == "output.weight":
            yield tensor if last else _stand_in(tensor, first)
        elif tensor.name == "output.bias":
            yield tensor if last or first else _zeros(tensor, block_type(0), (_MIDDLE_VOCABULARY,))
        elif tensor.name == "position_embd.weight":
            yield tensor if first else _zeros(tensor, tensor.type, tensor.shape)
        else:
            yield tensor


def _renamed(tensor: Tensor, name: str) -> Tensor:
    return Tensor(name, tensor.type, tensor.shape, tensor.nbytes, tensor.load, big_endian=tensor.big_endian)


def _stand_in(tensor: Tensor, whole_vocabulary: bool) -> Tensor:
    """Zeros where llama.cpp's loader insists on a matrix that the slice never uses: as small as can be."""
    columns, rows = tensor.shape
    if not whole_vocabulary:
        return _zeros(tensor, block_type(0), (columns, _MIDDLE_VOCABULARY))
    for name in ("tq1_0", "q4_0"):  # types that no CPU kernel repacks into a copy, or that fit short rows
        if columns % named_type(name).block_size == 0:
            return _zeros(tensor, named_type(name), (columns, rows))
    return _zeros(tensor, named_type("f16"), (columns, rows))


def _zeros(tensor: Tensor, type: BlockType, shape: tuple[int, ...]) -> Tensor:
    size = type.nbytes(shape)
    return Tensor(tensor.name, type, shape, size, lambda: np.zeros(size, np.uint8))
