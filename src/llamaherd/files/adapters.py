"""LoRA adapters of before GGUF (ggla) in GGUF's terms.

A ggla file stores, for a weight W, ``W.loraA`` as (r, in) and ``W.loraB`` as (r, out) in ggml order; GGUF
wants A as (in, r). Either way W += alpha / r * B A (llama.cpp, ``llama_apply_lora_from_file`` of 2023).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llamaherd.errors import MalformedFileError, UnsupportedFileError
from llamaherd.files.metadata import TypedValue, ValueType
from llamaherd.files.model_file import Bytes, ModelFile, Tensor
from llamaherd.files.names import gguf_name

__all__ = ["adapter_contents"]


def adapter_contents(model: ModelFile) -> tuple[dict[str, TypedValue], list[Tensor]]:
    """The metadata and tensors of a GGUF LoRA adapter, made from an open ggla file.

    Raises UnsupportedFileError for another container, MalformedFileError for a half pair or a tensor
    without a place in a llama model.
    """
    if model.container != "ggla":
        raise UnsupportedFileError(model.path, f"this is a {model.container_name} file, not a ggla adapter")
    alpha = model.metadata["alpha"]
    assert isinstance(alpha, int)
    metadata = {
        "general.architecture": TypedValue(ValueType.STRING, "llama"),
        "general.type": TypedValue(ValueType.STRING, "adapter"),
        "adapter.type": TypedValue(ValueType.STRING, "lora"),
        "adapter.lora.alpha": TypedValue(ValueType.FLOAT32, float(alpha)),
    }
    tensors = []
    for name, tensor in model.tensors.items():
        base, _, which = name.rpartition(".lora")
        new = gguf_name(base, "llama")
        if which not in ("A", "B") or new is None or len(tensor.shape) != 2:
            raise MalformedFileError(model.path, f"tensor {name!r} is no half of a LoRA pair")
        if f"{base}.lora{'B' if which == 'A' else 'A'}" not in model.tensors:
            raise MalformedFileError(model.path, f"tensor {name!r} has no other half")
        named = replace(tensor, name=f"{new}.lora_{which.lower()}")
        tensors.append(_transposed(named) if which == "A" else named)
    return metadata, tensors


def _transposed(tensor: Tensor) -> Tensor:
    if tensor.type.block_size != 1:
        raise UnsupportedFileError(tensor.name, f"a {tensor.type} adapter cannot be transposed exactly")
    columns, rows = tensor.shape
    size = tensor.type.block_bytes

    def load() -> Bytes:
        weights = tensor.raw.reshape(rows, columns, size)
        return np.ascontiguousarray(weights.transpose(1, 0, 2)).reshape(-1)

    return replace(tensor, shape=(rows, columns), offset=None, load=load)
