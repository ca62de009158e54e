"""Rotary scaling: a GGUF file's keys and tensors, and transformers' ``rope_parameters``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llamaherd.errors import UnsupportedFileError
from llamaherd.files.block_types import block_type
from llamaherd.files.checkpoint.families import Family
from llamaherd.files.checkpoint.hyperparameters import Getter
from llamaherd.files.metadata import TypedValue, Value
from llamaherd.files.model_file import ModelFile, Tensor

__all__ = ["rope_of_config", "rope_of_model", "rope_tensors", "rotated", "scaling_keys"]


def rope_of_model(model: ModelFile, get: Getter) -> dict[str, Any]:
    """The ``rope_parameters`` of ``model``. UnsupportedFileError for scalings that have no counterpart."""
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


def _llama3_scaling(model: ModelFile, get: Getter, theta: float) -> dict[str, Any]:
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
    rope = rope_of_config(config)
    n_rot = rotated(config, rope)
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


def rope_of_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary parameters of full attention, from today's ``rope_parameters`` or the older keys."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope = dict(rope.get("full_attention", rope))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", config.get("rotary_emb_base", 10000.0)))
    for key in ("partial_rotary_factor", "rotary_pct"):
        if key in config:
            rope.setdefault("partial_rotary_factor", config[key])
    return rope


def rotated(config: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    """How many values of each head are rotated."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(head_dim * rope.get("partial_rotary_factor", 1.0))


def scaling_keys(
    config: Mapping[str, Any], rope: Mapping[str, Any], family: Family, path: str | Path
) -> dict[str, Value | TypedValue]:
    """The GGUF keys of a checkpoint's rotary scaling. UnsupportedFileError for kinds not carried over."""
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
