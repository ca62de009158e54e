"""Models that can go to torch and come back, as (name, options of synthesize, transformers' model type)."""

from __future__ import annotations

from typing import Any

SAMPLES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "llama": ("llama", {}, None),
    "llama tied, spm": ("llama", {"tied": True, "tokenizer": "spm"}, None),
    "llama without groups": ("llama", {"n_kv_heads": 4}, None),
    "mistral": ("mistral", {}, "mistral"),
    "qwen2": ("qwen2", {}, None),
    "qwen3": ("qwen3", {}, None),
    "phi3": ("phi3", {}, None),
    "gemma2": ("gemma2", {"layers": 4}, None),
    "gemma3": ("gemma3", {"layers": 7}, None),
    "gptneox": ("gptneox", {}, None),
}

TOLERANCE = {"gemma2": 0.06, "gemma3": 0.06, "gptneox": 0.02}
"""llama.cpp looks GELU up in a table of halves; the others agree to a float32's rounding."""

TEXTS = [
    "Hello, the quick llama é 日本!",
    "  two  spaces\n\nnew lines\t and a tab",
    "123456 it's they'LL 3.14",
    "a",
    "🦙 ok ▁ Ġ",
    "the quick brown fox and the other animals",
]
