"""The architectures that we can synthesise: a row each, saying how it differs from the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llamaherd.errors import InvalidParameterError
from llamaherd.files.blueprint import Architecture, Shape, encoder, encoder_decoder, mamba, mamba_keys
from llamaherd.files.metadata import Value

__all__ = ["ARCHITECTURES", "Architecture", "Shape", "architecture_named"]


def architecture_named(name: str) -> Architecture:
    """The row called ``name``; InvalidParameterError lists the names there are."""
    if name not in ARCHITECTURES:
        raise InvalidParameterError("architecture", name, f"one of {', '.join(sorted(ARCHITECTURES))}")
    return ARCHITECTURES[name]


def _sliding(pattern: int | None = None) -> Callable[[Shape], Mapping[str, Value]]:
    def keys(s: Shape) -> Mapping[str, Value]:
        window: dict[str, Value] = {"attention.sliding_window": s.sliding_window}
        if pattern is not None:
            window["attention.sliding_window_pattern"] = pattern
        return window

    return keys


_GEMMA = {"tokenizer": "spm", "head": "tied", "head_size": 32, "scaled_embedding": True}

_ROWS = [
    Architecture("llama", "llama"),
    Architecture("mistral", "llama", tokenizer="spm", head="own"),
    Architecture("mixtral", "llama", tokenizer="spm", ffn="experts", head="own"),
    Architecture(
        "gptneox", "gptneox", norm="layer", norm_bias=True, qkv="fused", qkv_bias=True, out_bias=True,
        ffn="plain", ffn_bias=True, head="own", grouped_heads=False, rotary=0.5,
        keys=lambda s: {"use_parallel_residual": True},
    ),
    Architecture(
        "gpt2", "gpt2", norm="layer", norm_bias=True, qkv="fused", qkv_bias=True, out_bias=True,
        ffn="plain", ffn_bias=True, positions="learned", grouped_heads=False,
    ),
    Architecture(
        "phi2", "phi2", norm="layer", norm_bias=True, qkv_bias=True, out_bias=True, ffn="plain",
        ffn_bias=True, ffn_norm=False, head="own", head_bias=True, grouped_heads=False, rotary=0.5,
    ),
    Architecture("phi3", "phi3", tokenizer="spm", qkv="fused", ffn="fused", head="own"),
    Architecture("qwen2", "qwen2", qkv_bias=True),
    Architecture("qwen3", "qwen3", qk_norm="head", head_size=32),
    Architecture(
        "qwen2moe", "qwen2moe", qkv_bias=True, ffn="experts", shared_expert=True, head="own",
        keys=lambda s: {"expert_feed_forward_length": s.n_ff, "expert_shared_feed_forward_length": s.n_ff},
    ),
    Architecture(
        "qwen3moe", "qwen3moe", qk_norm="head", head_size=32, ffn="experts",
        keys=lambda s: {"expert_feed_forward_length": s.n_ff},
    ),
    Architecture("gemma", "gemma", **_GEMMA),  # type: ignore[arg-type]
    Architecture(
        "gemma2", "gemma2", post_norms=True, **_GEMMA,  # type: ignore[arg-type]
        keys=lambda s: {
            "attention.sliding_window": s.sliding_window, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    Architecture(
        "gemma3", "gemma3", post_norms=True, qk_norm="head", keys=_sliding(), **_GEMMA  # type: ignore[arg-type]
    ),
    Architecture(
        "olmo", "olmo", norm="layer", attn_norm=False, ffn_norm=False, output_norm=False, head="own",
    ),
    Architecture(
        "olmo2", "olmo2", attn_norm=False, ffn_norm=False, qk_norm="row", post_norms=True, head="own",
    ),
    Architecture("olmoe", "olmoe", qk_norm="row", ffn="experts", head="own", grouped_heads=False),
    Architecture("stablelm", "stablelm", norm="layer", norm_bias=True, head="own", rotary=0.5),
    Architecture(
        "starcoder2", "starcoder2", norm="layer", norm_bias=True, qkv_bias=True, out_bias=True,
        ffn="plain", ffn_bias=True,
    ),
    Architecture(
        "falcon", "falcon", norm="layer", norm_bias=True, qkv="fused", ffn="plain", ffn_norm=False,
    ),
    Architecture(
        "bloom", "bloom", norm="layer", norm_bias=True, qkv="fused", qkv_bias=True, out_bias=True,
        ffn="plain", ffn_bias=True, positions="alibi", grouped_heads=False, embedding_norm=True,
    ),
    Architecture(
        "mpt", "mpt", norm="layer", qkv="fused", ffn="plain", positions="alibi", grouped_heads=False,
        keys=lambda s: {"attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 8.0},
    ),
    Architecture("command-r", "command-r", norm="layer", ffn_norm=False, head="tied",
                 keys=lambda s: {"logit_scale": 1.0}),
    Architecture("internlm2", "internlm2", tokenizer="spm", head="own"),
    Architecture("smollm3", "smollm3"),
    Architecture(
        "granite", "granite",
        keys=lambda s: {
            "embedding_scale": 2.0, "residual_scale": 0.5, "attention.scale": 0.25, "logit_scale": 2.0,
        },
    ),
    Architecture(
        "minicpm", "minicpm", tokenizer="spm",
        keys=lambda s: {"embedding_scale": 2.0, "residual_scale": 0.5, "logit_scale": 1.0},
    ),
    Architecture("mistral3", "mistral3", head="own"),
    Architecture(
        "starcoder", "starcoder", norm="layer", norm_bias=True, qkv="fused", qkv_bias=True, out_bias=True,
        ffn="plain", ffn_bias=True, positions="learned",
    ),
    Architecture("orion", "orion", tokenizer="spm", norm="layer", norm_bias=True, head="own"),
    Architecture("xverse", "xverse", tokenizer="spm", head="own"),
    Architecture("exaone", "exaone"),
    Architecture("exaone4", "exaone4", attn_norm=False, ffn_norm=False, post_norms=True, qk_norm="head"),
    Architecture("nemotron", "nemotron", norm="layer", norm_bias=True, ffn="plain", head="own", rotary=0.5),
    Architecture("chatglm", "chatglm", qkv_bias=True, ffn="fused", rotary=0.5),
    Architecture("glm4", "glm4", post_norms=True, ffn="fused", rotary=0.5),
    Architecture(
        "cohere2", "cohere2", norm="layer", ffn_norm=False, head="tied",
        keys=lambda s: {"logit_scale": 1.0, "attention.sliding_window": s.sliding_window},
    ),
    Architecture("arcee", "arcee", ffn="plain"),
    Architecture("ernie4_5", "ernie4_5"),
    Architecture("seed_oss", "seed_oss", qkv_bias=True, ffn_norm_name="post_attention_norm"),
    Architecture(
        "gpt-oss", "gpt-oss", qkv_bias=True, out_bias=True, ffn_norm_name="post_attention_norm",
        ffn="experts", sinks=True, head="own", head_size=32,
        keys=lambda s: {
            "attention.sliding_window": s.sliding_window, "expert_feed_forward_length": s.n_ff,
        },
    ),
    Architecture(
        "deepseek", "deepseek", ffn="experts", shared_expert=True, leading_dense=1, grouped_heads=False,
        keys=lambda s: {
            "leading_dense_block_count": 1, "expert_feed_forward_length": s.n_ff,
            "expert_shared_count": 1, "expert_weights_scale": 1.0,
        },
    ),
    Architecture("mamba", "mamba", positions="none", weights=mamba, keys=mamba_keys),
    Architecture(
        "bert", "bert", tokenizer="wpm", norm="layer", norm_bias=True, qkv_bias=True, out_bias=True,
        ffn="plain", ffn_bias=True, positions="learned", head="none", grouped_heads=False, weights=encoder,
        keys=lambda s: {"attention.causal": False, "pooling_type": 1},
    ),
    Architecture(
        "nomic-bert", "nomic-bert", tokenizer="wpm", norm="layer", norm_bias=True, qkv="fused",
        head="none", grouped_heads=False, weights=encoder,
        keys=lambda s: {"attention.causal": False, "pooling_type": 1},
    ),
    Architecture(
        "t5", "t5", tokenizer="ugm", positions="none", grouped_heads=False, weights=encoder_decoder,
        keys=lambda s: {
            "attention.relative_buckets_count": 32, "decoder_start_token_id": 0,
            "decoder_block_count": s.layers,
        },
    ),
]  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {row.name: row for row in _ROWS}
"""Every architecture that can be synthesised, by the name users call it."""
