"""A GGUF file's hyperparameters as transformers' ``config.json``, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llamaherd.errors import UnsupportedFileError
from llamaherd.files.checkpoint.families import Family
from llamaherd.files.checkpoint.hyperparameters import Getter
from llamaherd.files.checkpoint.rotary import rope_of_config, rope_of_model, rotated, scaling_keys
from llamaherd.files.layers import count_layers
from llamaherd.files.metadata import TypedValue, Value, ValueType
from llamaherd.files.model_file import ModelFile

__all__ = ["REQUIRED_SETTINGS", "config_of_model", "metadata_of_config"]

_SAME = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
}


REQUIRED_SETTINGS = tuple(_SAME.values())
"""What no checkpoint can do without, in transformers' words."""


def config_of_model(model: ModelFile, family: Family) -> dict[str, Any]:
    """The ``config.json`` of ``model``. UnsupportedFileError for what transformers computes otherwise."""
    get = Getter(model, family)
    config: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "vocab_size": _vocabulary_size(model),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        **{theirs: get.integer(ours) for ours, theirs in _SAME.items()},
        "num_hidden_layers": count_layers(model),
    }
    for special in ("bos", "eos", "padding"):
        token = model.metadata.get(f"tokenizer.ggml.{special}_token_id")
        config[f"{'pad' if special == 'padding' else special}_token_id"] = token
    if family.gguf == "gptneox":
        return config | _neox_config(get)
    heads = config["num_attention_heads"]
    config |= {
        "num_key_value_heads": get.integer("attention.head_count_kv", heads),
        "rms_norm_eps": get.real("attention.layer_norm_rms_epsilon"),
        "head_dim": get.head_length(),
        "rope_parameters": rope_of_model(model, get),
    }
    if family.gguf == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in model.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in model.tensors
    if family.model_type == "mistral":
        config["sliding_window"] = None
    if family.gguf == "phi3":
        config |= _phi3_config(model, get)
    if family.window_period is not None:
        config |= _gemma_config(family, get, config)
    return config


def _vocabulary_size(model: ModelFile) -> int:
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UnsupportedFileError(model.path, "has no token_embd.weight of two dimensions")
    return embedding.shape[1]


def _neox_config(get: Getter) -> dict[str, Any]:
    n_head = get.head_length()
    rotary = get.integer("rope.dimension_count", n_head) / n_head
    return {
        "layer_norm_eps": get.real("attention.layer_norm_epsilon"),
        "use_parallel_residual": bool(get("use_parallel_residual", True)),
        "hidden_act": "gelu",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": get.real("rope.freq_base", 10000.0),
            "partial_rotary_factor": rotary,
        },
    }


def _phi3_config(model: ModelFile, get: Getter) -> dict[str, Any]:
    window = get("attention.sliding_window")
    rope = rope_of_model(model, get)
    n_head = get.head_length()
    rope["partial_rotary_factor"] = get.integer("rope.dimension_count", n_head) / n_head
    original = get.integer("rope.scaling.original_context_length", get.integer("context_length"))
    if "rope_factors_long.weight" in model.tensors:
        for length in ("long", "short"):
            factors = model.tensors[f"rope_factors_{length}.weight"].dequantize()
            rope[f"{length}_factor"] = [float(str(f)) for f in factors]
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        if get("rope.scaling.attn_factor") is not None:
            rope["attention_factor"] = get.real("rope.scaling.attn_factor")
    return {
        # as the file says, although llama.cpp itself attends to everything
        "sliding_window": window if isinstance(window, int) and window else None,
        "rope_parameters": rope,
        "original_max_position_embeddings": original,
    }


def _gemma_config(family: Family, get: Getter, config: Mapping[str, Any]) -> dict[str, Any]:
    giant = {"gemma2": 46, "gemma3": 62}[family.gguf]
    layers, n_head = config["num_hidden_layers"], config["head_dim"]
    more: dict[str, Any] = {
        "sliding_window": get.integer("attention.sliding_window", 4096),
        "query_pre_attn_scalar": (
            config["hidden_size"] // config["num_attention_heads"] if layers == giant else n_head
        ),
        "layer_types": [
            "sliding_attention" if windowed else "full_attention"
            for windowed in _windows(family, get, layers)
        ],
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if get(key) is not None:
            more[key] = get.real(key)
    if family.gguf == "gemma3":
        local = {"rope_type": "default", "rope_theta": get.real("rope.freq_base_swa", 10000.0)}
        more["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return more


def _windows(family: Family, get: Getter, layers: int) -> list[bool]:
    stated = get("attention.sliding_window_pattern")
    if isinstance(stated, np.ndarray):
        return [bool(flag) for flag in stated]
    period = stated if isinstance(stated, int) and stated else family.window_period
    assert period is not None
    return [(layer + 1) % period != 0 for layer in range(layers)]


# ---------------------------------------------------------------------------------------- import


def metadata_of_config(
    config: Mapping[str, Any], family: Family, path: str | Path
) -> dict[str, Value | TypedValue]:
    """The GGUF hyperparameters of a checkpoint. UnsupportedFileError for what llama.cpp does otherwise."""
    rope = rope_of_config(config)
    heads = config["num_attention_heads"]
    keys: dict[str, Value | TypedValue] = {ours: config[theirs] for ours, theirs in _SAME.items()}
    keys["attention.head_count_kv"] = config.get("num_key_value_heads") or heads
    keys["rope.dimension_count"] = rotated(config, rope)
    keys["rope.freq_base"] = float(rope.get("rope_theta", 10000.0))
    if "layer_norm_eps" in config:
        keys["attention.layer_norm_epsilon"] = float(config["layer_norm_eps"])
        keys["use_parallel_residual"] = bool(config.get("use_parallel_residual", True))
    else:
        keys["attention.layer_norm_rms_epsilon"] = float(config.get("rms_norm_eps", 1e-6))
    head_dim = config.get("head_dim")
    if head_dim and (
        head_dim != config["hidden_size"] // heads or family.gguf in ("qwen3", "gemma2", "gemma3")
    ):
        keys["attention.key_length"] = keys["attention.value_length"] = head_dim
    keys |= scaling_keys(config, rope, family, path)
    if family.window_period is not None:
        keys |= _gemma_keys(config, family, path)
    if family.gguf == "phi3":
        keys["attention.sliding_window"] = config.get("sliding_window") or 0
    return {f"{family.gguf}.{key}": value for key, value in keys.items()}


def _gemma_keys(config: Mapping[str, Any], family: Family, path: str | Path) -> dict[str, Value | TypedValue]:
    layers = config["num_hidden_layers"]
    usual = [(i + 1) % family.window_period != 0 for i in range(layers)]  # type: ignore[operator]
    types = config.get("layer_types")
    flags = [kind == "sliding_attention" for kind in types] if types else usual
    keys: dict[str, Value | TypedValue] = {"attention.sliding_window": config["sliding_window"]}
    if flags != usual:
        pattern = TypedValue(ValueType.ARRAY, np.array(flags, np.bool_), ValueType.BOOL)
        keys["attention.sliding_window_pattern"] = pattern
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key):
            keys[key] = float(config[key])
    local = (config.get("rope_parameters") or {}).get("sliding_attention", {})
    theta = local.get("rope_theta", config.get("rope_local_base_freq"))
    if family.gguf == "gemma3" and theta not in (None, 10000.0):
        keys["rope.freq_base_swa"] = float(theta)
    giant = {"gemma2": 46, "gemma3": 62}[family.gguf]
    expected = (
        config["hidden_size"] // config["num_attention_heads"] if layers == giant else config["head_dim"]
    )
    if config.get("query_pre_attn_scalar", expected) != expected:
        raise UnsupportedFileError(
            path,
            f"query_pre_attn_scalar is {config['query_pre_attn_scalar']}, but llama.cpp scales by {expected}",
        )
    return keys
