"""The token embeddings of a GGUF file as a torch module."""

from __future__ import annotations

import math

import torch

from ..errors import UnsupportedFileError
from ..files import open as open_file

__all__ = ["input_embeddings"]


def input_embeddings(path: str) -> torch.nn.Embedding:
    """A frozen float32 embedding [n_vocab, hidden] of a model file.

    llama.cpp scales Gemma's embeddings by sqrt(hidden) for tokens but not for embeddings that come from
    outside, so they are scaled here.

    Raises:
        UnsupportedFileError: the file has no token embeddings (a slice of a model).
    """
    with open_file(path) as file:
        tensor = file.tensors.get("token_embd.weight")
        if tensor is None:
            raise UnsupportedFileError(path, "it holds no token embeddings (token_embd.weight)")
        weights = torch.from_numpy(tensor.dequantize())
        if (file.architecture or "").startswith("gemma"):
            weights *= math.sqrt(weights.shape[1])
        embedding = torch.nn.Embedding(*weights.shape, _weight=weights)
        embedding.weight.requires_grad_(False)
        return embedding
