"""How the weights of a GGUF file and of a transformers checkpoint correspond, architecture by architecture.

Names and transformations are the inverse of llama.cpp's converters (``conversion/*.py``). All
arrays are in numpy's order, rows (outputs) first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from llamaherd.errors import InvalidParameterError

__all__ = ["FAMILIES", "Family", "Heads", "family_of_gguf", "family_of_model_type"]

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Heads:
    """How many query and key-value heads there are; the row permutations need it."""

    query: int
    key: int


Transform = Callable[[Floats, Heads], Floats]


@dataclass(frozen=True)
class Family:
    """One architecture in both worlds.

    model_type and class_name: transformers'. gguf: ``general.architecture``. names: GGUF base name (no
    ``.weight``) to transformers', with {} for the layer. to_torch and to_gguf: for the base names whose
    values differ. window_period: of sliding windows, every window_period-th layer being dense.
    """

    model_type: str
    class_name: str
    gguf: str
    names: Mapping[str, str]
    to_torch: Mapping[str, Transform] = field(default_factory=dict)
    to_gguf: Mapping[str, Transform] = field(default_factory=dict)
    window_period: int | None = None

    def torch_name(self, name: str) -> tuple[str, str] | None:
        """transformers' name of a GGUF tensor and the base name that transformations go by; None: no such."""
        base, _, suffix = name.rpartition(".")
        layer = re.match(r"blk\.(\d+)\.", base)
        general = re.sub(r"^blk\.\d+\.", "blk.{}.", base)
        if general not in self.names or suffix not in ("weight", "bias"):
            return None
        return f"{self.names[general].format(layer[1] if layer else '')}.{suffix}", general

    def gguf_name(self, name: str) -> tuple[str, str] | None:
        """The GGUF name of a transformers weight and its base name; None if there is none."""
        base, _, suffix = name.rpartition(".")
        layer = re.search(r"\.layers\.(\d+)\.", base)
        general = re.sub(r"\.layers\.\d+\.", ".layers.{}.", base)
        found = {theirs: ours for ours, theirs in self.names.items()}.get(general)
        if found is None or suffix not in ("weight", "bias"):
            return None
        return f"{found.format(layer[1] if layer else '')}.{suffix}", found


def family_of_gguf(architecture: str | None, model_type: str | None = None) -> Family:
    """The family of a GGUF architecture; ``model_type`` chooses where there are several (llama, mistral).

    Raises InvalidParameterError naming those there are.
    """
    for family in FAMILIES:
        if family.gguf == architecture and model_type in (None, family.model_type):
            return family
    if any(family.gguf == architecture for family in FAMILIES):
        fitting = [family.model_type for family in FAMILIES if family.gguf == architecture]
        raise InvalidParameterError("model_type", model_type, f"one of {', '.join(fitting)}")
    known = sorted({family.gguf for family in FAMILIES})
    raise InvalidParameterError("architecture", architecture, f"one of {', '.join(known)} to become torch")


def family_of_model_type(model_type: Any) -> Family:
    """The family that transformers calls ``model_type``. InvalidParameterError names those there are."""
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    known = sorted(family.model_type for family in FAMILIES)
    raise InvalidParameterError("model_type", model_type, f"one of {', '.join(known)} to become GGUF")


# ------------------------------------------------------------------------------------- transforms


def _split_halves(values: Floats, heads: int) -> Floats:
    """From GGUF's rotary order (pairs side by side) to transformers' (first halves, then second halves)."""
    rows = values.shape[0] // heads // 2
    shaped = values.reshape(heads, rows, 2, *values.shape[1:])
    return np.ascontiguousarray(shaped.swapaxes(1, 2)).reshape(values.shape)


def _join_halves(values: Floats, heads: int) -> Floats:
    """The inverse of `_split_halves`: ``LlamaModel.permute`` of llama.cpp's converter."""
    rows = values.shape[0] // heads // 2
    shaped = values.reshape(heads, 2, rows, *values.shape[1:])
    return np.ascontiguousarray(shaped.swapaxes(1, 2)).reshape(values.shape)


def _minus_one(values: Floats, heads: Heads) -> Floats:
    return np.subtract(values, 1, dtype=np.float32)


def _plus_one(values: Floats, heads: Heads) -> Floats:
    return np.add(values, 1, dtype=np.float32)


def _interleave_qkv(values: Floats, heads: Heads) -> Floats:
    """[all queries, all keys, all values] to GPT-NeoX's [query, key, value] a head."""
    shaped = values.reshape(3, heads.query, -1, *values.shape[1:])
    joined: Floats = np.ascontiguousarray(shaped.swapaxes(0, 1)).reshape(values.shape)
    return joined


def _gather_qkv(values: Floats, heads: Heads) -> Floats:
    shaped = values.reshape(heads.query, 3, -1, *values.shape[1:])
    return np.ascontiguousarray(shaped.swapaxes(0, 1)).reshape(values.shape)


_ROTARY_TO_TORCH: Mapping[str, Transform] = {
    "blk.{}.attn_q": lambda values, heads: _split_halves(values, heads.query),
    "blk.{}.attn_k": lambda values, heads: _split_halves(values, heads.key),
}
_ROTARY_TO_GGUF: Mapping[str, Transform] = {
    "blk.{}.attn_q": lambda values, heads: _join_halves(values, heads.query),
    "blk.{}.attn_k": lambda values, heads: _join_halves(values, heads.key),
}

# ------------------------------------------------------------------------------------------- table

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _inside(**names: str) -> dict[str, str]:
    return {f"blk.{{}}.{ours}": f"model.layers.{{}}.{theirs}" for ours, theirs in names.items()}


_ATTENTION = _inside(
    attn_q="self_attn.q_proj",
    attn_k="self_attn.k_proj",
    attn_v="self_attn.v_proj",
    attn_output="self_attn.o_proj",
)
_MLP = _inside(ffn_gate="mlp.gate_proj", ffn_up="mlp.up_proj", ffn_down="mlp.down_proj")
_NORMS = _inside(attn_norm="input_layernorm", ffn_norm="post_attention_layernorm")
_QK_NORMS = _inside(attn_q_norm="self_attn.q_norm", attn_k_norm="self_attn.k_norm")
_GEMMA_NORMS = _inside(
    attn_norm="input_layernorm",
    post_attention_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    post_ffw_norm="post_feedforward_layernorm",
)

_LLAMA = {**_OUTSIDE, **_ATTENTION, **_MLP, **_NORMS}
_GEMMA2 = {**_OUTSIDE, **_ATTENTION, **_MLP, **_GEMMA_NORMS}
_GEMMA3 = {**_GEMMA2, **_QK_NORMS}
_PHI3 = {
    **_OUTSIDE,
    **_NORMS,
    **_inside(
        attn_qkv="self_attn.qkv_proj",
        attn_output="self_attn.o_proj",
        ffn_up="mlp.gate_up_proj",
        ffn_down="mlp.down_proj",
    ),
}
_NEOX_INSIDE = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_NEOX = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
    **{f"blk.{{}}.{ours}": f"gpt_neox.layers.{{}}.{theirs}" for ours, theirs in _NEOX_INSIDE.items()},
}


def _norms_of(names: Mapping[str, str], transform: Transform) -> dict[str, Transform]:
    return {name: transform for name in names if name.endswith("norm")}


FAMILIES: tuple[Family, ...] = (
    Family("llama", "LlamaForCausalLM", "llama", _LLAMA, _ROTARY_TO_TORCH, _ROTARY_TO_GGUF),
    Family("mistral", "MistralForCausalLM", "llama", _LLAMA, _ROTARY_TO_TORCH, _ROTARY_TO_GGUF),
    Family("qwen2", "Qwen2ForCausalLM", "qwen2", _LLAMA),
    Family("qwen3", "Qwen3ForCausalLM", "qwen3", {**_LLAMA, **_QK_NORMS}),
    Family("phi3", "Phi3ForCausalLM", "phi3", _PHI3),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        "gemma2",
        _GEMMA2,
        _norms_of(_GEMMA2, _minus_one),
        _norms_of(_GEMMA2, _plus_one),
        window_period=2,
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        "gemma3",
        _GEMMA3,
        _norms_of(_GEMMA3, _minus_one),
        _norms_of(_GEMMA3, _plus_one),
        window_period=6,
    ),
    Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        "gptneox",
        _NEOX,
        {"blk.{}.attn_qkv": _interleave_qkv},
        {"blk.{}.attn_qkv": _gather_qkv},
    ),
)
"""Every architecture that can go to torch and come back; where two share a GGUF one, the first is usual."""
