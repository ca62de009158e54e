"""Which architectures can be cut between layers, what a cut must mind, and why the others cannot.

llama.cpp builds a slice as a model of its own, so a slice is right only if nothing in its graph depends on
where a layer stood in the whole: not a pattern by layer index, not the number of layers, not something
that happens only at the input. Each row here was read from llama.cpp's source of that architecture
(``src/models/*.cpp``) and is run whole against slices in tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from llamaherd.files.metadata import Metadata, TypedValue, ValueType

__all__ = ["CUT_RULES", "OVERWRITTEN_INPUT", "UNCUTTABLE", "CutRule"]

Reason = str


@dataclass(frozen=True)
class CutRule:
    """What a cut of one architecture must mind.

    period: layers behave differently by their index modulo this (rotary or not), and llama.cpp takes no
    metadata for it: a slice must start at a multiple. window_period: sliding windows follow such a
    pattern, and llama.cpp reads it from metadata, so a slice states its part of the pattern; dense_first:
    which end of the period is dense. input_scale: ``embedding_scale`` also scales hidden states given in
    place of embeddings, so later slices set it to 1. defaults: keys whose default depends on the number
    of layers, stated in every slice. refuse: a reason against these layers, from (metadata, layers of
    the whole, layers of the slice), or None. input_node: see `OVERWRITTEN_INPUT`.
    """

    period: int = 1
    window_period: int | None = None
    dense_first: bool = False
    input_scale: bool = False
    defaults: Callable[[int], Mapping[str, TypedValue]] = lambda layers: {}
    refuse: Callable[[Metadata, int, int], Reason | None] = lambda metadata, whole, part: None
    input_node: str | None = None


def _number(metadata: Metadata, key: str, default: float = 0) -> float:
    value = metadata.get(key, default)
    return float(value) if isinstance(value, (int, float)) else default


def _gemma_scale(architecture: str, giant: int) -> Callable[[Metadata, int, int], Reason | None]:
    """Gemma's 27B, told by its ``giant`` layers, scales attention by another length than the others."""

    def refuse(metadata: Metadata, whole: int, part: int) -> Reason | None:
        heads = _number(metadata, f"{architecture}.attention.head_count", 1) or 1
        head = _number(metadata, f"{architecture}.embedding_length") // heads
        if head == _number(metadata, f"{architecture}.attention.key_length"):
            return None
        if (whole == giant) == (part == giant):
            return None
        return f"llama.cpp knows the 27B by its {giant} layers and scales the attention of that one otherwise"

    return refuse


def _command_r(metadata: Metadata, whole: int, part: int) -> Reason | None:
    if (whole >= 64) == (part >= 64):
        return None
    return "llama.cpp expects query and key norms exactly in models of 64 or more layers"


def _exaone4(metadata: Metadata, whole: int, part: int) -> Reason | None:
    if whole != 64 and part != 64:
        return None
    return "llama.cpp uses sliding windows exactly in its models of 64 layers"


def _minicpm_defaults(layers: int) -> Mapping[str, TypedValue]:
    scale = np.float32(1.4) / np.sqrt(np.float32(layers))  # as minicpm.cpp computes it, in float32
    return {"residual_scale": TypedValue(ValueType.FLOAT32, float(scale))}


_PLAIN = CutRule()

CUT_RULES: Mapping[str, CutRule] = {
    "llama": _PLAIN,
    "gptneox": _PLAIN,
    "gpt2": _PLAIN,
    "phi2": _PLAIN,
    "phi3": _PLAIN,
    "qwen2": _PLAIN,
    "qwen3": _PLAIN,
    "qwen2moe": _PLAIN,
    "qwen3moe": _PLAIN,
    "gemma3": CutRule(window_period=6, refuse=_gemma_scale("gemma3", 62)),
    "olmo": _PLAIN,
    "olmo2": CutRule(window_period=4),
    "olmoe": _PLAIN,
    "stablelm": _PLAIN,
    "starcoder2": _PLAIN,
    "falcon": _PLAIN,
    "mpt": _PLAIN,
    "command-r": CutRule(refuse=_command_r),
    "internlm2": _PLAIN,
    "smollm3": CutRule(period=4),
    "granite": CutRule(input_scale=True),
    "minicpm": CutRule(input_scale=True, defaults=_minicpm_defaults),
    "mistral3": _PLAIN,
    "starcoder": _PLAIN,
    "orion": _PLAIN,
    "xverse": _PLAIN,
    "exaone": _PLAIN,
    "exaone4": CutRule(refuse=_exaone4),
    "nemotron": _PLAIN,
    "chatglm": _PLAIN,
    "cohere2": CutRule(window_period=4),
    "arcee": _PLAIN,
    "ernie4_5": _PLAIN,
    "seed_oss": _PLAIN,
    "gpt-oss": CutRule(window_period=2),
    "deepseek": _PLAIN,
    "mamba": _PLAIN,
}
"""By ``general.architecture``: those whose slices are tested to be bit-exact."""

_ENCODER = "it is an encoder: every token sees every other, and its input is normalised before layer 0"
_TWO_SIDED = "it is an encoder-decoder: each decoder layer needs the encoder's output, not only hidden states"
_INPUT_NORM = "its input is normalised before layer 0, and a slice would normalise hidden states again"
_PER_LAYER = "its layers share per-layer embeddings of the tokens, which hidden states do not carry"
_COUNTED = "llama.cpp chooses how it computes positions by the number of layers"

_SCALED = (
    "llama.cpp multiplies whatever enters layer 0, hidden states too, by the square root of their length, "
    "and that cannot be undone exactly"
)

UNCUTTABLE: Mapping[str, Reason] = {
    "gemma": _SCALED,
    "gemma2": _SCALED,
    "t5": _TWO_SIDED,
    "t5encoder": _ENCODER,
    "bert": _ENCODER,
    "nomic-bert": _ENCODER,
    "nomic-bert-moe": _ENCODER,
    "jina-bert-v2": _ENCODER,
    "jina-bert-v3": _ENCODER,
    "modern-bert": _ENCODER,
    "neo-bert": _ENCODER,
    "eurobert": _ENCODER,
    "bloom": _INPUT_NORM,
    "rwkv6": _INPUT_NORM,
    "rwkv7": f"{_INPUT_NORM}; and layers after the first use the first layer's values",
    "gemma3n": _PER_LAYER,
    "gemma4": _PER_LAYER,
    "baichuan": _COUNTED,
    "glm4": "llama.cpp aborts when its graph is given hidden states in place of tokens",
    "glm4moe": "llama.cpp aborts when its graph is given hidden states in place of tokens",
}
"""By ``general.architecture``: those that cannot be cut, with the reason."""

OVERWRITTEN_INPUT: Mapping[str, CutRule] = {
    "gemma": CutRule(input_node="inp_scaled"),
    "gemma2": CutRule(window_period=2, refuse=_gemma_scale("gemma2", 46), input_node="inp_scaled"),
    "bloom": CutRule(input_node="inp_norm-0"),
}
"""Architectures of `UNCUTTABLE` whose slices are exact all the same if whoever runs them writes the hidden
states into the graph node ``input_node`` when llama.cpp has computed it (in ``cb_eval``), besides giving
them as ``llama_batch.embd``: what the graph did to its input is then overwritten."""


def window_pattern(rule: CutRule, metadata: Metadata, key: str, layers: int) -> list[bool] | None:
    """Which of the whole's layers have a sliding window, or None where the architecture has no pattern.

    As llama.cpp's ``load_swa_pattern``: the array under ``key``, or a period there, or the default one.
    """
    if rule.window_period is None:
        return None
    stated = metadata.get(key)
    if isinstance(stated, np.ndarray):
        return [bool(flag) for flag in stated[:layers]]
    period = int(stated) if isinstance(stated, int) and stated else rule.window_period
    edge = 0 if rule.dense_first else period - 1
    return [index % period != edge for index in range(layers)]


def nearest_starts(period: int, start: int, layers: int) -> list[int]:
    """The layers around ``start`` at which a pattern of ``period`` may be cut."""
    below = start // period * period
    return [layer for layer in (below, below + math.ceil(period)) if 0 <= layer < layers]
