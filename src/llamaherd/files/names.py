"""Tensor names across containers: those of the files before GGUF, and GGUF's.

``{i}`` stands for a layer. The legacy names are those of llama.cpp before August 2023 (llama) and of
rustformers/llm and ggml's examples (the others).
"""

from __future__ import annotations

import re

__all__ = ["gguf_name", "layer_of", "legacy_name"]


def _both(legacy: str, gguf: str) -> dict[str, str]:
    """A weight and its bias."""
    return {f"{legacy}.weight": f"{gguf}.weight", f"{legacy}.bias": f"{gguf}.bias"}


_GPT2_LAYER = "model/h{i}"
_GPT2_PARTS = {"ln_1": "attn_norm", "ln_2": "ffn_norm"}
_GPT2_MATRICES = {
    "attn/c_attn": "attn_qkv",
    "attn/c_proj": "attn_output",
    "mlp/c_fc": "ffn_up",
    "mlp/c_proj": "ffn_down",
}

_NAMES: dict[str, dict[str, str]] = {
    "llama": {
        "tok_embeddings.weight": "token_embd.weight",
        "norm.weight": "output_norm.weight",
        "output.weight": "output.weight",
        "layers.{i}.attention_norm.weight": "blk.{i}.attn_norm.weight",
        "layers.{i}.attention.wq.weight": "blk.{i}.attn_q.weight",
        "layers.{i}.attention.wk.weight": "blk.{i}.attn_k.weight",
        "layers.{i}.attention.wv.weight": "blk.{i}.attn_v.weight",
        "layers.{i}.attention.wo.weight": "blk.{i}.attn_output.weight",
        "layers.{i}.ffn_norm.weight": "blk.{i}.ffn_norm.weight",
        "layers.{i}.feed_forward.w1.weight": "blk.{i}.ffn_gate.weight",
        "layers.{i}.feed_forward.w2.weight": "blk.{i}.ffn_down.weight",
        "layers.{i}.feed_forward.w3.weight": "blk.{i}.ffn_up.weight",
    },
    "gptneox": {
        "gpt_neox.embed_in.weight": "token_embd.weight",
        "embed_out.weight": "output.weight",
        **_both("gpt_neox.final_layer_norm", "output_norm"),
        **_both("gpt_neox.layers.{i}.input_layernorm", "blk.{i}.attn_norm"),
        **_both("gpt_neox.layers.{i}.attention.query_key_value", "blk.{i}.attn_qkv"),
        **_both("gpt_neox.layers.{i}.attention.dense", "blk.{i}.attn_output"),
        **_both("gpt_neox.layers.{i}.post_attention_layernorm", "blk.{i}.ffn_norm"),
        **_both("gpt_neox.layers.{i}.mlp.dense_h_to_4h", "blk.{i}.ffn_up"),
        **_both("gpt_neox.layers.{i}.mlp.dense_4h_to_h", "blk.{i}.ffn_down"),
    },
    "gpt2": {
        "model/wte": "token_embd.weight",
        "model/wpe": "position_embd.weight",
        "model/lm_head": "output.weight",
        "model/ln_f/g": "output_norm.weight",
        "model/ln_f/b": "output_norm.bias",
        **{f"{_GPT2_LAYER}/{a}/g": f"blk.{{i}}.{b}.weight" for a, b in _GPT2_PARTS.items()},
        **{f"{_GPT2_LAYER}/{a}/b": f"blk.{{i}}.{b}.bias" for a, b in _GPT2_PARTS.items()},
        **{f"{_GPT2_LAYER}/{a}/w": f"blk.{{i}}.{b}.weight" for a, b in _GPT2_MATRICES.items()},
        **{f"{_GPT2_LAYER}/{a}/b": f"blk.{{i}}.{b}.bias" for a, b in _GPT2_MATRICES.items()},
    },
    "bloom": {
        "tok_embeddings.weight": "token_embd.weight",
        "output.weight": "output.weight",
        **_both("norm", "token_embd_norm"),
        **_both("output_norm", "output_norm"),
        **_both("layers.{i}.attention_norm", "blk.{i}.attn_norm"),
        **_both("layers.{i}.attention.query_key_value", "blk.{i}.attn_qkv"),
        **_both("layers.{i}.attention.wo", "blk.{i}.attn_output"),
        **_both("layers.{i}.ffn_norm", "blk.{i}.ffn_norm"),
        **_both("layers.{i}.feed_forward.w1", "blk.{i}.ffn_up"),
        **_both("layers.{i}.feed_forward.w2", "blk.{i}.ffn_down"),
    },
    "mpt": {
        "transformer.wte.weight": "token_embd.weight",
        "transformer.norm_f.weight": "output_norm.weight",
        "transformer.blocks.{i}.norm_1.weight": "blk.{i}.attn_norm.weight",
        "transformer.blocks.{i}.attn.Wqkv.weight": "blk.{i}.attn_qkv.weight",
        "transformer.blocks.{i}.attn.out_proj.weight": "blk.{i}.attn_output.weight",
        "transformer.blocks.{i}.norm_2.weight": "blk.{i}.ffn_norm.weight",
        "transformer.blocks.{i}.ffn.up_proj.weight": "blk.{i}.ffn_up.weight",
        "transformer.blocks.{i}.ffn.down_proj.weight": "blk.{i}.ffn_down.weight",
    },
    "falcon": {
        "transformer.word_embeddings.weight": "token_embd.weight",
        "lm_head.weight": "output.weight",
        **_both("transformer.ln_f", "output_norm"),
        **_both("transformer.h.{i}.input_layernorm", "blk.{i}.attn_norm"),
        **_both("transformer.h.{i}.ln_mlp", "blk.{i}.attn_norm"),
        **_both("transformer.h.{i}.ln_attn", "blk.{i}.attn_norm_2"),
        "transformer.h.{i}.self_attention.query_key_value.weight": "blk.{i}.attn_qkv.weight",
        "transformer.h.{i}.self_attention.dense.weight": "blk.{i}.attn_output.weight",
        "transformer.h.{i}.mlp.dense_h_to_4h.weight": "blk.{i}.ffn_up.weight",
        "transformer.h.{i}.mlp.dense_4h_to_h.weight": "blk.{i}.ffn_down.weight",
    },
    "gptj": {
        "transformer.wte.weight": "token_embd.weight",
        **_both("lm_head", "output"),
        **_both("transformer.ln_f", "output_norm"),
        **_both("transformer.h.{i}.ln_1", "blk.{i}.attn_norm"),
        "transformer.h.{i}.attn.q_proj.weight": "blk.{i}.attn_q.weight",
        "transformer.h.{i}.attn.k_proj.weight": "blk.{i}.attn_k.weight",
        "transformer.h.{i}.attn.v_proj.weight": "blk.{i}.attn_v.weight",
        "transformer.h.{i}.attn.out_proj.weight": "blk.{i}.attn_output.weight",
        **_both("transformer.h.{i}.mlp.fc_in", "blk.{i}.ffn_up"),
        **_both("transformer.h.{i}.mlp.fc_out", "blk.{i}.ffn_down"),
    },
}

# falcon's two sizes call one tensor differently; the first name is the one written back
_BACK = {arch: {g: old for old, g in reversed(list(names.items()))} for arch, names in _NAMES.items()}

_LAYER = re.compile(r"(?<=[./h])(\d+)(?=[./])")


def _translate(name: str, table: dict[str, str]) -> str | None:
    found = _LAYER.search(name)
    if found is None:
        return table.get(name)
    pattern = f"{name[: found.start()]}{{i}}{name[found.end() :]}"
    result = table.get(pattern)
    return None if result is None else result.replace("{i}", found[1])


def gguf_name(name: str, architecture: str) -> str | None:
    """GGUF's name of a legacy file's tensor; None if there is none."""
    return _translate(name, _NAMES.get(architecture, {}))


def legacy_name(name: str, architecture: str) -> str | None:
    """The name that a file before GGUF gives the tensor GGUF calls ``name``; None if there is none."""
    return _translate(name, _BACK.get(architecture, {}))


def layer_of(name: str) -> int | None:
    """The layer that the tensor GGUF calls ``name`` belongs to; None for tensors of the whole model."""
    found = re.match(r"(?:enc\.|dec\.)?blk\.(\d+)\.", name)
    return int(found[1]) if found else None
