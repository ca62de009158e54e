"""A GGUF file's hyperparameters as transformers' ``config.json``, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llamaherd.errors import UnsupportedFileError
from llamaherd.files.block_types import block_type
from llamaherd.files.checkpoint.families import Family
from llamaherd.files.layers import count_layers
from llamaherd.files.metadata import TypedValue, Value, ValueType
from llamaherd.files.model_file import ModelFile, Tensor

__all__ = ["REQUIRED_SETTINGS", "config_of_model", "metadata_of_config", "rope_tensors"]

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
    get = _Getter(model, family)
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
        "rope_parameters": _rope_of_model(model, get),
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


class _Getter:
    """Hyperparameters by their key after the architecture's prefix."""

    def __init__(self, model: ModelFile, family: Family) -> None:
        self.model = model
        self.prefix = family.gguf

    def __call__(self, key: str, default: Value | None = None) -> Value | None:
        return self.model.metadata.get(f"{self.prefix}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnsupportedFileError(
                self.model.path, f"{self.prefix}.{key} is {value!r}; a checkpoint needs one positive number"
            )
        return value

    def head_length(self) -> int:
        stated = self("attention.key_length")
        heads = self.integer("attention.head_count")
        length = stated if isinstance(stated, int) else self.integer("embedding_length") // heads
        if length < 1:
            raise UnsupportedFileError(self.model.path, f"{heads} attention heads leave none any length")
        return length

    def real(self, key: str, default: float | None = None) -> float:
        value = self(key, default)
        if not isinstance(value, (int, float)):
            raise UnsupportedFileError(self.model.path, f"{self.prefix}.{key} is {value!r}, not a number")
        return float(str(np.float32(value)))  # 1e-05, and not its float32 neighbour's digits


def _neox_config(get: _Getter) -> dict[str, Any]:
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


def _phi3_config(model: ModelFile, get: _Getter) -> dict[str, Any]:
    window = get("attention.sliding_window")
    rope = _rope_of_model(model, get)
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


def _gemma_config(family: Family, get: _Getter, config: Mapping[str, Any]) -> dict[str, Any]:
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


def _windows(family: Family, get: _Getter, layers: int) -> list[bool]:
    stated = get("attention.sliding_window_pattern")
    if isinstance(stated, np.ndarray):
        return [bool(flag) for flag in stated]
    period = stated if isinstance(stated, int) and stated else family.window_period
    assert period is not None
    return [(layer + 1) % period != 0 for layer in range(layers)]


# -------------------------------------------------------------------------------- rotary scaling


def _rope_of_model(model: ModelFile, get: _Getter) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": get.real("rope.freq_base", 10000.0)}
    scaling = str(get("rope.scaling.type", "none"))
    factor = get.real("rope.scaling.factor", 1.0)
    if "rope_freqs.weight" in model.tensors:
        return rope | _llama3_scaling(model, get, rope["rope_theta"])
    if scaling == "linear" or (scaling == "none" and factor not in (0.0, 1.0)):
        return rope if factor in (0.0, 1.0) else rope | {"rope_type": "linear", "factor": factor}
    if scaling in ("none", "longrope"):
        return rope
    raise UnsupportedFileError(
        model.path, f"rotary scaling of type {scaling!r} has no exact counterpart here"
    )


def _llama3_factors(rope: Mapping[str, Any], n_rot: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Llama 3's frequency divisors, as llama.cpp's converter computes them for ``rope_freqs.weight``."""
    low, high = rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)
    old = rope.get("original_max_position_embeddings", 8192)
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, n_rot, 2, dtype=np.float32) / np.float32(n_rot))
    factors = []
    for wavelength in 2 * math.pi / frequencies.astype(np.float64):
        if wavelength < old / high:
            factors.append(1.0)
        elif wavelength > old / low:
            factors.append(rope["factor"])
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def _llama3_scaling(model: ModelFile, get: _Getter, theta: float) -> dict[str, Any]:
    """The parameters that give the file's ``rope_freqs.weight``; refused if they are not Llama 3's."""
    stored = model.tensors["rope_freqs.weight"].dequantize().reshape(-1)
    guess = {"rope_theta": theta, "factor": float(stored.max()), "original_max_position_embeddings": 8192}
    if not np.allclose(_llama3_factors(guess, 2 * len(stored)), stored, rtol=1e-4):
        raise UnsupportedFileError(
            model.path,
            "rope_freqs.weight holds other factors than Llama 3's scaling gives; a checkpoint has no place "
            "for them",
        )
    return guess | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def rope_tensors(config: Mapping[str, Any], family: Family) -> list[Tensor]:
    """The tensors that hold a checkpoint's rotary scaling in GGUF: Llama 3's, or Phi 3's long and short."""
    rope = _rope(config)
    n_rot = _rotated(config, rope)
    if rope.get("rope_type") == "llama3":
        return [_vector("rope_freqs.weight", _llama3_factors(rope, n_rot))]
    if rope.get("rope_type") == "longrope" and family.gguf == "phi3":
        return [
            _vector(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
            for length in ("long", "short")
        ]
    return []


def _vector(name: str, values: np.ndarray[Any, np.dtype[np.float32]]) -> Tensor:
    return Tensor.from_bytes(name, block_type(0), (len(values),), values)


# ---------------------------------------------------------------------------------------- import


def metadata_of_config(
    config: Mapping[str, Any], family: Family, path: str | Path
) -> dict[str, Value | TypedValue]:
    """The GGUF hyperparameters of a checkpoint. UnsupportedFileError for what llama.cpp does otherwise."""
    rope = _rope(config)
    heads = config["num_attention_heads"]
    keys: dict[str, Value | TypedValue] = {ours: config[theirs] for ours, theirs in _SAME.items()}
    keys["attention.head_count_kv"] = config.get("num_key_value_heads") or heads
    keys["rope.dimension_count"] = _rotated(config, rope)
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
    keys |= _scaling_keys(config, rope, family, path)
    if family.window_period is not None:
        keys |= _gemma_keys(config, family, path)
    if family.gguf == "phi3":
        keys["attention.sliding_window"] = config.get("sliding_window") or 0
    return {f"{family.gguf}.{key}": value for key, value in keys.items()}


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary parameters of full attention, from today's ``rope_parameters`` or the older keys."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope = dict(rope.get("full_attention", rope))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", config.get("rotary_emb_base", 10000.0)))
    for key in ("partial_rotary_factor", "rotary_pct"):
        if key in config:
            rope.setdefault("partial_rotary_factor", config[key])
    return rope


def _rotated(config: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(head_dim * rope.get("partial_rotary_factor", 1.0))


def _scaling_keys(
    config: Mapping[str, Any], rope: Mapping[str, Any], family: Family, path: str | Path
) -> dict[str, Value | TypedValue]:
    kind = rope["rope_type"]
    if kind in ("default", "llama3"):
        return {}
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if kind == "longrope" and family.gguf == "phi3":
        original = rope.get("original_max_position_embeddings") or config["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / original
        usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        return {
            "rope.scaling.original_context_length": original,
            "rope.scaling.attn_factor": float(rope.get("attention_factor") or usual),
        }
    raise UnsupportedFileError(
        path, f"rotary scaling of type {kind!r} is not among those carried over exactly"
    )


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
