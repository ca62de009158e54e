"""Well-formed GGUF files with something wrong in what they say: keys dropped, retyped, set to extremes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np

from llamaherd.files.block_types import block_type
from llamaherd.files.metadata import TypedValue, ValueType
from llamaherd.files.model_file import Tensor
from llamaherd.files.strings import StringArray
from llamaherd.files.synthesize import TinyModel
from llamaherd.files.writer import write_gguf

_NUMBERS = (0, 1, 2, 3, 5, 7, 16, 31, 63, 64, 65, 128, 255, 511, 512, 513, 1000, 2**31 - 1, 2**31, 2**32 - 1)
_TEXTS = ("", "llama", "gpt2", "bert", "t5", "rwkv", "none", "yarn", "longrope", "x", "default", "\0")
_EXTRA = (
    "expert_count", "expert_used_count", "expert_group_count", "expert_group_used_count", "rope.scaling.type",
    "rope.scaling.factor", "attention.key_length", "attention.value_length", "attention.head_count_kv",
    "rope.dimension_count", "vocab_size", "attention.causal", "pooling_type", "attention.sliding_window",
    "nextn_predict_layers", "rope.dimension_sections", "attention.layer_norm_epsilon", "logit_scale",
)  # fmt: skip


def write_variation(dice: random.Random, model: TinyModel, path: Path) -> str:
    """Write ``model`` with one to three changes; says which."""
    metadata = {
        key: value if isinstance(value, TypedValue) else None for key, value in model.metadata.items()
    }
    from llamaherd.files.metadata import to_typed

    typed = {key: value or to_typed(model.metadata[key]) for key, value in metadata.items()}
    tensors = list(model.tensors)
    said = []
    for _ in range(dice.choice((1, 1, 2, 3))):
        if dice.random() < 0.75:
            said.append(_change_key(dice, typed, model.architecture))
        else:
            said.append(_change_tensor(dice, tensors))
    path.unlink(missing_ok=True)
    write_gguf(path, typed, tensors, sync=False)
    return "; ".join(said)


def _change_key(dice: random.Random, typed: dict[str, TypedValue], arch: str) -> str:
    keys = [key for key in typed if not key.endswith("chat_template")]
    key = dice.choice(keys) if dice.random() < 0.8 else f"{arch}.{dice.choice(_EXTRA)}"
    old = typed.get(key)
    turn = dice.randrange(5)
    if turn == 0 and old is not None:
        del typed[key]
        return f"{key} dropped"
    if turn == 1 or old is None:
        typed[key] = _any_value(dice)
    elif old.type is ValueType.ARRAY:
        typed[key] = _changed_array(dice, old)
    elif old.type is ValueType.STRING:
        typed[key] = TypedValue(ValueType.STRING, dice.choice(_TEXTS))
    elif old.type in (ValueType.FLOAT32, ValueType.FLOAT64):
        typed[key] = TypedValue(old.type, dice.choice((0.0, -1.0, 1e-30, 1e30, float("inf"), float("nan"))))
    elif old.type is ValueType.BOOL:
        typed[key] = TypedValue(ValueType.BOOL, not old.value)
    else:
        info = np.iinfo(old.type.dtype)  # type: ignore[arg-type]
        typed[key] = TypedValue(old.type, min(dice.choice(_NUMBERS), int(info.max)))
    return f"{key} = {str(typed[key].value)[:60]} ({typed[key].type.name})"


def _any_value(dice: random.Random) -> TypedValue:
    kind = dice.choice(
        (ValueType.UINT32, ValueType.INT32, ValueType.STRING, ValueType.FLOAT32, ValueType.BOOL, None)
    )
    if kind is None:
        length = dice.choice((0, 1, 2, 3, 64))
        return TypedValue(
            ValueType.ARRAY, np.full(length, dice.choice((0, 1, 2, 4)), np.int32), ValueType.INT32
        )
    if kind is ValueType.STRING:
        return TypedValue(kind, dice.choice(_TEXTS))
    if kind is ValueType.FLOAT32:
        return TypedValue(kind, dice.choice((0.0, 1.0, -1.0)))
    if kind is ValueType.BOOL:
        return TypedValue(kind, dice.random() < 0.5)
    return TypedValue(kind, dice.choice(_NUMBERS[:-2]))


def _changed_array(dice: random.Random, old: TypedValue) -> TypedValue:
    if old.element_type is ValueType.STRING:
        items = list(StringArray.from_texts(old.value))  # type: ignore[arg-type]
        turn = dice.randrange(5)
        if turn == 0:
            items = items[: dice.randrange(len(items) + 1)]
        elif turn == 1 and items:
            items[dice.randrange(len(items))] = items[dice.randrange(len(items))]
        elif turn == 2 and items:
            items[dice.randrange(len(items))] = dice.choice(("", "a\0b", "\0", b"\xff\xfe", "zz" * 300, " "))
        elif turn == 3:
            items = []
        else:
            items += ["more"]
        return TypedValue(ValueType.ARRAY, items, ValueType.STRING)
    values = np.array(old.value)
    turn = dice.randrange(4)
    if turn == 0:
        values = values[: dice.randrange(len(values) + 1)]
    elif turn == 1 and len(values):
        values[dice.randrange(len(values))] = dice.choice((0, 1, 5, 100))
    elif turn == 2:
        return TypedValue(ValueType.ARRAY, values.astype(np.float64), ValueType.FLOAT64)
    elif values.dtype.kind == "f" and len(values):
        values[dice.randrange(len(values))] = dice.choice((np.nan, np.inf, -np.inf))
    return TypedValue(ValueType.ARRAY, values, old.element_type)


def _change_tensor(dice: random.Random, tensors: list[Tensor]) -> str:
    index = dice.randrange(len(tensors))
    old = tensors[index]
    turn = dice.randrange(6)
    if turn == 0:
        del tensors[index]
        return f"{old.name} dropped"
    if turn == 1:
        new = dice.choice(
            (f"{old.name}x", "blk.0.attn_q.bias", "blk.99.ffn_up.weight", "blk.x.y", "rope_freqs.weight")
        )
        if any(tensor.name == new for tensor in tensors):
            return "nothing"
        tensors[index] = replace(old, name=new)
    elif turn == 2 and len(old.shape) == 2:
        tensors[index] = replace(old, shape=old.shape[::-1]) if old.type.block_size == 1 else old
    elif turn == 3 and old.type.block_size == 1:
        tensors[index] = replace(old, shape=(old.n_elements,))
    elif turn == 4:
        kind = block_type(dice.choice((0, 1, 2, 8, 24, 26, 28, 30)))
        if old.shape[0] % kind.block_size == 0:
            zeros = np.zeros(kind.nbytes(old.shape), np.uint8)
            tensors[index] = Tensor.from_bytes(old.name, kind, old.shape, zeros)
    else:
        tensors[index], tensors[0] = tensors[0], tensors[index]
    changed = tensors[index]
    return f"{old.name} -> {changed.name} {changed.shape} {changed.type}"
