"""What one wants to know of a model file at a glance, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from llamaherd.errors import FileError
from llamaherd.files.contents import Contents, contents_of
from llamaherd.files.model_file import ModelFile

__all__ = ["MemoryNeed", "Summary", "TypeShare", "memory_needed", "summarize"]

_ROW_KEYS = (
    "context_length",
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "expert_count",
    "expert_used_count",
)


@dataclass(frozen=True)
class TypeShare:
    """How much of a model is of one tensor type. ``bits`` is per weight, None where that is not known."""

    type: str
    tensors: int
    weights: int
    nbytes: int
    bits: float | None


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes to run a model: its weights, and the KV cache of ``n_ctx`` tokens in f16."""

    n_ctx: int
    weights: int
    kv_cache: int

    @property
    def total(self) -> int:
        """Both together; llama.cpp adds compute buffers, tens to some hundreds of MiB."""
        return self.weights + self.kv_cache


@dataclass(frozen=True)
class Summary:
    """A model file at a glance. Sizes in bytes; ``hyperparameters`` by GGUF's names without the prefix."""

    path: str
    container: str
    architecture: str | None
    name: str | None
    files: int
    nbytes: int
    parameters: int
    tensors: int
    types: list[TypeShare]
    hyperparameters: dict[str, int | list[int]] = field(default_factory=dict)
    tokenizer: str | None = None
    vocabulary: int | None = None
    chat_template: str | None = None
    memory: MemoryNeed | None = None
    notes: list[str] = field(default_factory=list)


def summarize(model: ModelFile, *, n_ctx: int | None = None) -> Summary:
    """Summarise an open model; ``n_ctx`` (default: the model's, at most 4096) is for the memory it needs."""
    shares = _type_shares(model)
    base = Summary(
        path=str(model.path),
        container=model.container_name,
        architecture=model.architecture,
        name=None,
        files=len(model.parts),
        nbytes=model.nbytes,
        parameters=model.n_parameters,
        tensors=len(model.tensors),
        types=shares,
    )
    try:
        contents = contents_of(model)
    except FileError as error:
        return replace(base, notes=[str(error)])
    values = contents.values()
    hyperparameters: dict[str, int | list[int]] = {}
    for key in _ROW_KEYS:
        value = values.get(f"{contents.architecture}.{key}")
        if isinstance(value, np.ndarray):
            hyperparameters[key] = [int(x) for x in value]
        elif isinstance(value, int):
            hyperparameters[key] = value
    trained = hyperparameters.get("context_length")
    wanted = n_ctx or min(trained if isinstance(trained, int) and trained > 0 else 4096, 4096)
    tokens = values.get("tokenizer.ggml.tokens")
    name, template = values.get("general.name"), values.get("tokenizer.chat_template")
    tokenizer = [values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre")]
    return replace(
        base,
        name=name if isinstance(name, str) else None,
        hyperparameters=hyperparameters,
        tokenizer=", ".join(part for part in tokenizer if isinstance(part, str)) or None,
        vocabulary=len(tokens) if tokens is not None and not isinstance(tokens, (int, float)) else None,
        chat_template=template if isinstance(template, str) else None,
        memory=memory_needed(contents, wanted),
        notes=_few(contents.notes),
    )


def _few(notes: list[str]) -> list[str]:
    return notes if len(notes) <= 5 else [*notes[:5], f"... and {len(notes) - 5} more like these"]


def _type_shares(model: ModelFile) -> list[TypeShare]:
    """By type, the largest first."""
    sums: dict[str, list[int]] = {}
    known: dict[str, bool] = {}
    for tensor in model.tensors.values():
        row = sums.setdefault(str(tensor.type), [0, 0, 0])
        known[str(tensor.type)] = tensor.type.known
        row[0] += 1
        row[1] += tensor.n_elements
        row[2] += tensor.nbytes
    shares = [
        TypeShare(name, count, weights, size, 8 * size / weights if weights and known[name] else None)
        for name, (count, weights, size) in sums.items()
    ]
    return sorted(shares, key=lambda share: -share.nbytes)


def memory_needed(contents: Contents, n_ctx: int) -> MemoryNeed:
    """The bytes that the weights and an f16 KV cache of ``n_ctx`` tokens take.

    The cache of every layer with attention is counted in full, as llama.cpp allocates it by default;
    architectures that store something else there (latent attention, states) need less than said.
    """
    weights = sum(tensor.nbytes for tensor in contents.tensors.values())
    values = contents.values()
    arch = contents.architecture

    def per_layer(key: str, count: int, default: list[int]) -> list[int]:
        value = values.get(f"{arch}.{key}")
        if isinstance(value, np.ndarray) and len(value) == count:
            return [int(x) for x in value]
        return [value] * count if isinstance(value, int) else default

    layers = values.get(f"{arch}.block_count")
    n_embd = values.get(f"{arch}.embedding_length")
    if not isinstance(layers, int) or not isinstance(n_embd, int) or not 0 < layers <= 1 << 12:
        return MemoryNeed(n_ctx, weights, 0)
    heads = per_layer("attention.head_count", layers, [0] * layers)
    kv_heads = per_layer("attention.head_count_kv", layers, heads)
    size = n_embd // heads[0] if heads[0] > 0 else 0
    key_length = per_layer("attention.key_length", layers, [size] * layers)
    value_length = per_layer("attention.value_length", layers, key_length)
    cells = -(-n_ctx // 256) * 256  # libllama pads a context to this
    elements = sum(h * (k + v) for h, k, v in zip(kv_heads, key_length, value_length, strict=True))
    return MemoryNeed(n_ctx, weights, 2 * cells * elements)
