"""torch models of tiny GGUF files, built without transformers' GGUF loader (it knows few architectures well).

Each is transformers' own implementation, given the file's hyperparameters and weights; which weight goes where
is gguf-py's table for its converters, read backwards.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers as tf

from llamaherd.files import open as open_file

_BASE = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "head_dim": "attention.key_length",
}
_LAYER_NORM = {"rms_norm_eps": None, "layer_norm_eps": "attention.layer_norm_epsilon", "head_dim": None}


def _permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the interleaving of rotary pairs that llama.cpp's converter applies to llama's q and k."""
    rows = weight.shape[0]
    shape = (heads, rows // heads // 2, 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


Fix = Callable[[dict[str, torch.Tensor], Any], None]


def _llama_heads(state: dict[str, torch.Tensor], config: Any) -> None:
    for name, value in state.items():
        if "q_proj" in name:
            state[name] = _permuted(value, config.num_attention_heads)
        elif "k_proj" in name:
            state[name] = _permuted(value, config.num_key_value_heads)


def _gemma_norms(state: dict[str, torch.Tensor], config: Any) -> None:
    for name, value in state.items():
        if "norm" in name:
            state[name] = value - 1


ORACLES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any], Fix | None]] = {
    # architecture: model, config, keys of its metadata, fixed values, a fix of the weights
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig, {}, {}, _llama_heads),
    "mistral": (tf.MistralForCausalLM, tf.MistralConfig, {}, {"sliding_window": None}, _llama_heads),
    "qwen2": (tf.Qwen2ForCausalLM, tf.Qwen2Config, {}, {}, None),
    "qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config, {}, {}, None),
    "gemma": (tf.GemmaForCausalLM, tf.GemmaConfig, {}, {}, _gemma_norms),
    "gemma2": (
        tf.Gemma2ForCausalLM,
        tf.Gemma2Config,
        {
            "sliding_window": "attention.sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        {"query_pre_attn_scalar": "head_dim"},
        _gemma_norms,
    ),
    "gemma3": (
        tf.Gemma3ForCausalLM,
        tf.Gemma3TextConfig,
        {"sliding_window": "attention.sliding_window"},
        {"query_pre_attn_scalar": "head_dim"},
        _gemma_norms,
    ),
    "olmo2": (tf.Olmo2ForCausalLM, tf.Olmo2Config, {"head_dim": None}, {}, None),
    "smollm3": (tf.SmolLM3ForCausalLM, tf.SmolLM3Config, {"head_dim": None}, {}, _llama_heads),
    "granite": (
        tf.GraniteForCausalLM,
        tf.GraniteConfig,
        {
            "head_dim": None,
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
            "attention_multiplier": "attention.scale",
        },
        {},
        _llama_heads,
    ),
    "starcoder2": (
        tf.Starcoder2ForCausalLM,
        tf.Starcoder2Config,
        {"rms_norm_eps": None, "norm_epsilon": "attention.layer_norm_epsilon", "head_dim": None},
        {"use_bias": True, "sliding_window": None},
        None,
    ),
    "stablelm": (
        tf.StableLmForCausalLM,
        tf.StableLmConfig,
        _LAYER_NORM,
        {"use_qkv_bias": False},
        None,
    ),
    "command-r": (
        tf.CohereForCausalLM,
        tf.CohereConfig,
        {**_LAYER_NORM, "logit_scale": "logit_scale"},
        {},
        None,
    ),
}


def torch_model(path: Path, architecture: str) -> Any:
    """transformers' implementation of ``architecture`` with the weights of the file."""
    kind, config_kind, keys, fixed, fix = ORACLES[architecture]
    with open_file(path) as file:
        name = str(file.metadata["general.architecture"])
        settings: dict[str, Any] = {"vocab_size": len(file.metadata["tokenizer.ggml.tokens"])}
        for field, key in {**_BASE, **keys}.items():
            value = None if key is None else file.metadata.get(f"{name}.{key}")
            if value is not None:
                settings[field] = float(value) if isinstance(value, float) else int(np.max(value))
        settings |= {k: settings.get(v, v) for k, v in fixed.items() if v is not None}
        settings |= {k: None for k, v in fixed.items() if v is None}
        theta = file.metadata.get(f"{name}.rope.freq_base", 10000.0)
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(theta)}
        settings |= {
            "rope_parameters": rope,
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        if architecture == "gemma3":  # its sliding layers always rotate by 10000
            local = float(file.metadata.get(f"{name}.rope.freq_base_swa", 10000.0))
            settings["rope_parameters"] = {
                "full_attention": rope,
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
            }
        rotated = file.metadata.get(f"{name}.rope.dimension_count")
        head = settings["hidden_size"] // settings["num_attention_heads"]
        if architecture == "stablelm" and rotated is not None:
            rope["partial_rotary_factor"] = int(rotated) / head
        weights = {n: torch.from_numpy(t.dequantize().copy()) for n, t in file.tensors.items()}
    settings["tie_word_embeddings"] = "output.weight" not in weights
    config = config_kind(**settings, attn_implementation="eager")
    model = kind(config).eval()
    number = next(n for n, text in gguf.MODEL_ARCH_NAMES.items() if text == name)
    table = gguf.get_tensor_name_map(number, settings["num_hidden_layers"])
    state = {}
    for key in model.state_dict():
        found = table.get_name(key, try_suffixes=(".weight", ".bias"))
        if found in weights:
            state[key] = weights.pop(found)
    state = {key: value.clone() for key, value in state.items()}
    if fix is not None:
        fix(state, config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert not [m for m in missing if m != "lm_head.weight"], missing
    assert not weights, f"weights without a place: {list(weights)}"
    model.tie_weights()
    return model
