"""LoRA adapters against torch models whose weights were merged by hand."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from llamaherd.errors import (
    FileError,
    InvalidParameterError,
    NativeError,
    RequestError,
    UnknownParameterError,
)
from llamaherd.files.block_types import block_type
from llamaherd.files.model_file import Tensor
from llamaherd.files.writer import write_gguf

RANK, ALPHA = 4, 8.0
IDS = torch.tensor([[20, 30, 40, 50, 60, 70]])


def write_adapter(path, seed, *, architecture="llama", width=64):
    """An adapter of the feed-forward down projections: (a, b) of each layer, and its file."""
    rng = np.random.default_rng(seed)
    tensors, factors = [], []
    for layer in range(2):
        a = rng.standard_normal((RANK, 2 * width)).astype(np.float32) / 10
        b = rng.standard_normal((width, RANK)).astype(np.float32) / 2
        factors.append((torch.from_numpy(a), torch.from_numpy(b)))
        for name, values in (("lora_a", a), ("lora_b", b)):
            key = f"blk.{layer}.ffn_down.weight.{name}"
            tensors.append(Tensor.from_bytes(key, block_type(0), values.shape[::-1], values))
    metadata = {
        "general.type": "adapter",
        "general.architecture": architecture,
        "adapter.type": "lora",
        "adapter.lora.alpha": ALPHA,
    }
    write_gguf(path, metadata, tensors)
    return factors


def merged(model, *adapters):
    """A torch copy with W += scale * alpha / r * B A."""
    model = copy.deepcopy(model)
    for factors, scale in adapters:
        for layer, (a, b) in zip(model.model.layers, factors, strict=True):
            layer.mlp.down_proj.weight.data += scale * ALPHA / RANK * (b @ a)
    return model


def gap(ours, theirs):
    return (ours(IDS).logits - theirs(IDS).logits.detach()).abs().max()


def test_scale_switch_and_delete_equal_merged_weights(fresh, pair, tmp_path):
    one = write_adapter(tmp_path / "one.gguf", 1)
    two = write_adapter(tmp_path / "two.gguf", 2)
    model, plain = fresh(), pair.theirs
    model.load_adapter(tmp_path / "one.gguf")
    assert gap(model, plain) > 0.1
    assert gap(model, merged(plain, (one, 1.0))) < 1e-3
    model.scale_adapter(0.3)
    assert gap(model, merged(plain, (one, 0.3))) < 1e-3
    model.load_adapter(tmp_path / "two.gguf", "second", scale=2.0)
    assert gap(model, merged(plain, (one, 0.3), (two, 2.0))) < 1e-3
    assert model.active_adapters() == ["default", "second"]
    model.set_adapter("second")
    assert gap(model, merged(plain, (two, 2.0))) < 1e-3
    model.disable_adapters()
    assert model.active_adapters() == []
    assert gap(model, plain) < 1e-3
    model.enable_adapters()
    assert gap(model, merged(plain, (two, 2.0))) < 1e-3
    model(IDS, output_hidden_states=True)  # another context takes the adapters over
    assert gap(model, merged(plain, (two, 2.0))) < 1e-3
    model.delete_adapter("default")
    assert gap(model, merged(plain, (two, 2.0))) < 1e-3
    model.delete_adapter("second")
    assert gap(model, plain) < 1e-3


def test_bad_adapters_are_refused(fresh, tmp_path, tiny):
    model = fresh()
    write_adapter(tmp_path / "one.gguf", 1)
    write_adapter(tmp_path / "wide.gguf", 1, width=32)
    write_adapter(tmp_path / "other.gguf", 1, architecture="qwen2")
    for path in (tmp_path / "none.gguf", tmp_path / "wide.gguf", tmp_path / "other.gguf", tiny()):
        with pytest.raises((FileError, NativeError)):
            model.load_adapter(path)
    assert model.active_adapters() == []
    model.load_adapter(tmp_path / "one.gguf")
    with pytest.raises(RequestError, match="delete_adapter"):
        model.load_adapter(tmp_path / "one.gguf")
    with pytest.raises(InvalidParameterError, match="loaded"):
        model.set_adapter("third")
    with pytest.raises(InvalidParameterError, match="scale"):
        model.scale_adapter(float("nan"))
    with pytest.raises(UnknownParameterError, match="scale"):
        model.load_adapter(tmp_path / "one.gguf", "b", scales=2)
