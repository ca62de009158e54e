"""The part of `check` that looks at metadata: hyperparameters and the vocabulary.

Most rules are llama.cpp's own: where it asserts, the process dies, so those must be found before it loads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from llamaherd.files.contents import Contents
from llamaherd.files.faults import Faults
from llamaherd.files.metadata import TypedValue, ValueType
from llamaherd.files.strings import StringArray
from llamaherd.files.vocabulary import BYTE

__all__ = ["check_metadata", "check_vocabulary"]


_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
_MAX_EXPERTS = 1024  # LLAMA_MAX_EXPERTS
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
_TOKENIZERS = (
    "llama",
    "bert",
    "gpt2",
    "t5",
    "rwkv",
    "plamo2",
    "gemma4",
    "hybriddna",
    "none",
    "no_vocab",
    "test",
)
_UNSIGNED = (ValueType.UINT8, ValueType.UINT16, ValueType.UINT32, ValueType.UINT64)
_WHOLE = (*_UNSIGNED, ValueType.INT8, ValueType.INT16, ValueType.INT32, ValueType.INT64)
_MAX_LISTED = 8

# the type libllama asks for, by how a key ends
_TYPES: dict[ValueType, tuple[str, ...]] = {
    ValueType.UINT32: (
        "general.alignment", "general.file_type", ".vocab_size", ".attention.key_length",
        ".attention.value_length", ".rope.dimension_count", ".rope.scaling.original_context_length",
        ".pooling_type", ".expert_count", ".leading_dense_block_count", ".nextn_predict_layers",
    ),
    ValueType.FLOAT32: (
        "_epsilon", ".rope.freq_base", ".rope.scaling.factor", ".rope.scale_linear",
        ".rope.scaling.attn_factor", ".attn_logit_softcapping", ".final_logit_softcapping",
        ".attention.clamp_kqv", ".logit_scale",
        ".attention.max_alibi_bias", ".attention.scale", ".embedding_scale", ".residual_scale",
    ),
    ValueType.BOOL: (
        ".attention.causal", ".use_parallel_residual", ".rope.scaling.finetuned", ".expert_weights_norm",
        "ggml.add_bos_token", "ggml.add_eos_token", "ggml.add_space_prefix", "ggml.add_sep_token",
        "ggml.remove_extra_whitespaces",
    ),
    ValueType.STRING: (
        "general.name", "general.type", "tokenizer.ggml.pre", "tokenizer.chat_template", ".rope.scaling.type",
    ),
}  # fmt: skip
_MAYBE_ARRAYS = (".attention.key_length", ".attention.value_length")


class _Keys:
    """Reads hyperparameters, reporting those of a wrong type."""

    def __init__(self, contents: Contents, faults: Faults) -> None:
        self.metadata = contents.metadata
        self.arch = contents.architecture
        self.faults = faults

    def typed(self, key: str) -> TypedValue | None:
        return self.metadata.get(key)

    def whole(self, part: str, *, required: bool = False) -> list[int] | None:
        """The value of ``<arch>.<part>`` as a list (one for all layers, or one each)."""
        key = f"{self.arch}.{part}"
        typed = self.typed(key)
        if typed is None:
            if required:
                self.faults.error(key, "is missing")
            return None
        value = typed.value
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
            return [int(x) for x in value]
        if typed.type is ValueType.UINT32 and isinstance(typed.value, int):
            return [typed.value]
        self.faults.error(key, f"must be a u32, it is {_type_name(typed)}")
        return None


def _type_name(typed: TypedValue) -> str:
    if typed.element_type is not None:
        return f"an array of {typed.element_type.name.lower()}"
    return typed.type.name.lower()


def check_metadata(contents: Contents, faults: Faults) -> None:
    """Report hyperparameters that are missing, of a wrong type, or that make llama.cpp abort."""
    typed = contents.metadata.get("general.architecture")
    if typed is None or not isinstance(typed.value, str):
        faults.error("general.architecture", "is missing, or not a text")
        return
    _check_known_types(contents, faults)
    keys = _Keys(contents, faults)
    layers = keys.whole("block_count", required=True)
    if layers is not None and (len(layers) != 1 or not 1 <= layers[0] <= _MAX_LAYERS):
        faults.error(f"{keys.arch}.block_count", f"is {layers}; 1 to {_MAX_LAYERS} layers are possible")
        layers = None
    for part in ("context_length", "embedding_length"):
        value = keys.whole(part, required=True)
        if value is not None and (len(value) != 1 or value[0] <= 0):
            faults.error(f"{keys.arch}.{part}", f"is {value}; it must be one positive number")
    _check_heads(keys, layers[0] if layers else None, faults)
    _check_experts(keys, faults)
    extra = keys.whole("nextn_predict_layers")
    if extra and layers and extra[0] > layers[0]:
        faults.error(f"{keys.arch}.nextn_predict_layers", f"is {extra[0]} of {layers[0]} layers")
    scaling = keys.typed(f"{keys.arch}.rope.scaling.type")
    if scaling is not None and not (isinstance(scaling.value, str) and scaling.value in _ROPE_SCALINGS):
        known = ", ".join(_ROPE_SCALINGS)
        faults.error(f"{keys.arch}.rope.scaling.type", f"is {scaling.value!r}; known: {known}")


def _check_known_types(contents: Contents, faults: Faults) -> None:
    """libllama refuses a key whose value has another type than it asks for."""
    for key, typed in contents.metadata.items():
        wanted = next((kind for kind, ends in _TYPES.items() if key.endswith(ends)), None)
        if wanted is not None and typed.type is not wanted and typed.type is not ValueType.ARRAY:
            faults.error(key, f"must be {wanted.name.lower()}, it is {_type_name(typed)}")
        elif wanted is not None and typed.type is ValueType.ARRAY and not key.endswith(_MAYBE_ARRAYS):
            faults.error(key, f"must be one {wanted.name.lower()}, it is {_type_name(typed)}")
        value = typed.value
        if isinstance(value, float) and not np.isfinite(value):
            faults.error(key, f"is {value}")


def _check_heads(keys: _Keys, n_layer: int | None, faults: Faults) -> None:
    for part in ("feed_forward_length", "expert_used_count"):
        _check_length(keys, part, keys.whole(part), n_layer, faults)
    heads = keys.whole("attention.head_count")
    kv = keys.whole("attention.head_count_kv") or heads
    embd = keys.whole("embedding_length")
    for part, values in (("attention.head_count", heads), ("attention.head_count_kv", kv)):
        if values is None:
            continue
        key = f"{keys.arch}.{part}"
        _check_length(keys, part, values, n_layer, faults)
        if any(not 0 <= value <= 1 << 16 for value in values):
            faults.error(key, f"is {values[:_MAX_LISTED]}")
    if not heads or not kv or not embd or min(heads) <= 0 or min(kv) < 0:
        return
    pairs = zip(heads, kv, strict=True) if len(heads) == len(kv) else ((heads[0], k) for k in kv)
    if any(k and h % k for h, k in pairs):
        faults.error(f"{keys.arch}.attention.head_count_kv", "does not divide the number of heads")
    if keys.typed(f"{keys.arch}.attention.key_length") is None and embd[0] % heads[0]:
        faults.error(f"{keys.arch}.attention.head_count", f"{heads[0]} does not divide n_embd = {embd[0]}")


def _check_length(
    keys: _Keys, part: str, values: list[int] | None, n_layer: int | None, faults: Faults
) -> None:
    """A hyperparameter is one number, or one for each layer."""
    key = f"{keys.arch}.{part}"
    is_array = key in keys.metadata and keys.metadata[key].type is ValueType.ARRAY
    if values is not None and is_array and n_layer is not None and len(values) != n_layer:
        faults.error(key, f"has {len(values)} entries for {n_layer} layers")


def _check_experts(keys: _Keys, faults: Faults) -> None:
    """libllama asserts all of these."""
    count = (keys.whole("expert_count") or [0])[0]
    used = max(keys.whole("expert_used_count") or [0], default=0)
    groups = (keys.whole("expert_group_count") or [0])[0]
    groups_used = (keys.whole("expert_group_used_count") or [0])[0]
    where = f"{keys.arch}.expert_count"
    if count > _MAX_EXPERTS:
        faults.error(where, f"is {count}; at most {_MAX_EXPERTS} are possible")
    if used > count or (count > 0 and used == 0):
        faults.error(where, f"is {count}, but {used} are used for a token")
    if groups and groups >= max(count, 1):
        faults.error(where, f"is {count}, in {groups} groups")
    if groups > 1 and (count % groups or not 0 < groups_used < groups):
        faults.error(where, f"{count} experts in {groups} groups, {groups_used} used, do not fit together")


# ----------------------------------------------------------------------------------- vocabulary


def check_vocabulary(contents: Contents, faults: Faults) -> None:
    """Report a vocabulary that libllama refuses, aborts on, or cannot tokenise all text with."""
    model = contents.metadata.get("tokenizer.ggml.model")
    if model is None:
        faults.error("tokenizer.ggml.model", "is missing")
        return
    if not isinstance(model.value, str) or model.value not in _TOKENIZERS:
        faults.error("tokenizer.ggml.model", f"is {model.value!r}; known: {', '.join(_TOKENIZERS)}")
        return
    if model.value in ("none", "no_vocab"):
        return
    typed = contents.metadata.get("tokenizer.ggml.tokens")
    if typed is None:
        faults.error("tokenizer.ggml.tokens", "is missing")
        return
    if typed.element_type is not ValueType.STRING:
        faults.error("tokenizer.ggml.tokens", f"must be an array of texts, it is {_type_name(typed)}")
        return
    value: Any = typed.value
    tokens = value if isinstance(value, StringArray) else StringArray.from_texts(value)
    _check_tokens(tokens, faults)
    _check_lists(contents, len(tokens), model.value, faults)
    _check_special(contents, len(tokens), faults)
    _check_size(contents, len(tokens), faults)


def _check_tokens(tokens: StringArray, faults: Faults) -> None:
    if not len(tokens):
        faults.error("tokenizer.ggml.tokens", "is empty")
    seen: dict[bytes, int] = {}
    found = []
    for index, raw in enumerate(tokens.raws()):
        text = raw.split(b"\0", 1)[0] or b"[EMPTY_%d]" % index
        first = seen.setdefault(text, index)
        if first != index:
            found.append(f"{first} and {index} ({text.decode('utf-8', 'replace')!r})")
    if found:
        more = f" and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
        listed = ", ".join(found[:_MAX_LISTED])
        faults.error("tokenizer.ggml.tokens", f"entries with one text, which abort libllama: {listed}{more}")


def _check_lists(contents: Contents, n_tokens: int, model: str, faults: Faults) -> None:
    wanted = {"scores": (ValueType.FLOAT32, ValueType.INT32), "token_type": (ValueType.INT32,)}
    for name, kinds in wanted.items():
        key = f"tokenizer.ggml.{name}"
        typed = contents.metadata.get(key)
        if typed is None:
            if model == "llama":
                faults.warning(key, "is missing; texts will be tokenised badly")
            continue
        if typed.element_type not in kinds:
            names = " or ".join(kind.name.lower() for kind in kinds)
            faults.error(key, f"must be an array of {names}, it is {_type_name(typed)}")
            continue
        values = np.asarray(typed.value)
        if len(values) < n_tokens:
            faults.error(key, f"has {len(values)} entries for {n_tokens} tokens")
        elif values.dtype.kind == "f" and np.isnan(values).any():
            faults.error(key, "holds NaN")
        elif name == "token_type" and model == "bert" and (values[:n_tokens] == BYTE).any():
            faults.error(key, "has byte tokens, on which libllama's WordPiece tokenizer aborts")
        elif name == "token_type" and model == "llama" and not (values == BYTE).any():
            faults.warning(key, "has no byte tokens: text outside the vocabulary cannot be tokenised")
    merges = contents.metadata.get("tokenizer.ggml.merges")
    if model in ("gpt2", "gemma4") and (merges is None or merges.element_type is not ValueType.STRING):
        faults.error("tokenizer.ggml.merges", "is missing, or not an array of texts")


def _check_special(contents: Contents, n_tokens: int, faults: Faults) -> None:
    for key, typed in contents.metadata.items():
        if not (key.startswith("tokenizer.ggml.") and key.endswith("_token_id")):
            continue
        if typed.type not in _WHOLE or not isinstance(typed.value, int):
            faults.error(key, f"must be a u32, it is {_type_name(typed)}")
        elif not 0 <= typed.value < n_tokens and typed.value not in (-1, 0xFFFFFFFF):
            faults.warning(key, f"is {typed.value} of {n_tokens} entries; libllama ignores it")


def _check_size(contents: Contents, n_tokens: int, faults: Faults) -> None:
    embeddings = contents.tensors.get("token_embd.weight")
    if embeddings is not None and len(embeddings.shape) > 1 and embeddings.shape[1] != n_tokens:
        faults.error(embeddings.name, f"has {embeddings.shape[1]} rows for {n_tokens} vocabulary entries")
