"""What the containers before GGUF have in common: magic numbers, headers by architecture, eras of blocks.

GGML, GGMF and GGJT hold a header of fixed fields, a vocabulary, and tensors one after another. Which fields
the header has depends on the architecture, which the file does not name. Sources: llama.cpp before
August 2023, and rustformers/llm for the architectures other than llama.
"""

from __future__ import annotations

import re

__all__ = ["HEADERS", "MAGICS", "SPLIT_BY_COLUMNS", "VERSIONS", "block_era", "fits_architecture"]

MAGICS = {b"lmgg": "ggml", b"fmgg": "ggmf", b"tjgg": "ggjt", b"algg": "ggla"}
"""The first four bytes (a little-endian u32 such as 0x67676d6c) of each container."""

VERSIONS = {"ggmf": (1,), "ggjt": (1, 2, 3), "ggla": (1,)}
"""The versions each container had; GGML has no version field."""

ALIGNMENT = 32  # of tensor data in GGJT and ggla, counted from the start of the file

HEADERS: dict[str, tuple[str, ...]] = {
    "llama": ("n_vocab", "n_embd", "n_mult", "n_head", "n_layer", "n_rot", "ftype"),
    "gptneox": (
        "n_vocab", "n_ctx", "n_embd", "n_head", "n_layer", "n_rot", "use_parallel_residual", "ftype",
    ),
    "gpt2": ("n_vocab", "n_ctx", "n_embd", "n_head", "n_layer", "ftype", "n_vocab_again"),
    "gptj": ("n_vocab", "n_ctx", "n_embd", "n_head", "n_layer", "n_rot", "ftype", "n_vocab_again"),
    "bloom": ("n_vocab", "n_embd", "n_mult", "n_head", "n_layer", "ftype"),
    "mpt": ("n_embd", "max_seq", "n_head", "n_layer", "n_vocab", "alibi_max", "clip_kqv", "ftype"),
    "falcon": ("n_vocab", "n_embd", "n_head", "n_head_kv", "n_layer", "ftype"),
}  # fmt: skip
"""The header's fields in order, each an i32 but for those in `FLOATS`."""

FLOATS = frozenset({"alibi_max", "clip_kqv"})

_TENSOR_NAMES = {
    "bloom": r"(tok_embeddings\.weight|(output_)?norm\.(weight|bias)|output\.weight"
    r"|layers\.\d+\.(attention_norm|attention\.(query_key_value|wo)|ffn_norm|feed_forward\.w[12])"
    r"\.(weight|bias))",
    "llama": r"(tok_embeddings|norm|output)\.weight|layers\.\d+\.(attention_norm|ffn_norm"
    r"|attention\.(w[qkvo]|rotary_emb|inner_attention\.rope)|feed_forward\.w[123])\.(weight|freqs|inv_freq)",
    "gptneox": r"gpt_neox\..*|embed_out\.weight",
    "gpt2": r"model/.*",
    "gptj": r"transformer\.(wte|ln_f)\..*|lm_head\.(weight|bias)|transformer\.h\.\d+\.(ln_1|attn|mlp)\..*",
    "mpt": r"transformer\.(wte|norm_f)\.weight|transformer\.blocks\.\d+\..*",
    "falcon": r"transformer\.(word_embeddings|ln_f)\..*|lm_head\.weight|transformer\.h\.\d+"
    r"\.(input_layernorm|ln_attn|ln_mlp|self_attention|mlp)\..*",
}
_PATTERNS = {arch: re.compile(pattern) for arch, pattern in _TENSOR_NAMES.items()}

SPLIT_BY_COLUMNS = ("tok_embeddings.weight", "attention.wo.weight", "feed_forward.w2.weight")
"""Matrices whose rows are cut (along ne[0]) in a model of several parts; others are cut between rows."""

_FTYPE_FACTOR = 1000  # ftype = quantisation version * 1000 + format (ggml's GGML_QNT_VERSION_FACTOR)
_QUANTIZATION_VERSION_ERAS = {1: 2, 2: 3}


def fits_architecture(name: str, architecture: str) -> bool:
    """Whether a model of ``architecture`` has a tensor of this name."""
    return _PATTERNS[architecture].fullmatch(name) is not None


def block_era(container: str, version: int | None, ftype: int) -> int:
    """Which era's blocks a file holds: its quantisation version says, or else its container.

    ``ftype`` is the header's field. rustformers wrote the GGML container with today's blocks and ftype 2002.
    """
    stated = _QUANTIZATION_VERSION_ERAS.get(ftype // _FTYPE_FACTOR)
    if stated is not None:
        return stated
    return version or 1 if container == "ggjt" else 1
