from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.files.mutations import ggla

from llamaherd import files
from llamaherd.errors import MalformedFileError, UnsupportedFileError
from llamaherd.files.synthesize import synthesize


def test_a_ggla_adapter_opens(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(ggla())
    with files.open(tmp_path / "a.bin") as adapter:
        assert (adapter.container_name, adapter.metadata["r"], adapter.metadata["alpha"]) == ("ggla-1", 2, 4)
        assert adapter.tensors["layers.0.attention.wq.weight.loraA"].shape == (2, 32)
    assert files.check(tmp_path / "a.bin") == []


def test_it_becomes_a_gguf_adapter(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(ggla())
    with files.open(tmp_path / "a.bin") as adapter:
        old = adapter.tensors["layers.0.attention.wq.weight.loraA"].dequantize()
        files.convert(adapter, tmp_path / "a.gguf")
        with pytest.raises(UnsupportedFileError, match="GGUF"):
            files.convert(adapter, tmp_path / "b.bin", to="ggjt")
        with pytest.raises(UnsupportedFileError, match="adapter"):
            files.contents_of(adapter)
    with files.open(tmp_path / "a.gguf") as made:
        assert made.metadata["adapter.lora.alpha"] == 4.0
        new = made.tensors["blk.0.attn_q.weight.lora_a"]
        assert new.shape == (32, 2)
        np.testing.assert_array_equal(new.dequantize(), old.T)
    assert files.check(tmp_path / "a.gguf") == []


def test_half_a_pair_is_refused(tmp_path: Path) -> None:
    data = ggla().replace(b"loraB", b"loraC")
    (tmp_path / "a.bin").write_bytes(data)
    with files.open(tmp_path / "a.bin") as adapter, pytest.raises(MalformedFileError, match="other half"):
        files.adapter_contents(adapter)
    assert [fault.severity for fault in files.check(tmp_path / "a.bin")] == ["error"]


def test_the_adapter_changes_the_model_as_its_formula_says(tmp_path: Path) -> None:
    """W + alpha / r * B A, computed by numpy and written as a model, against libllama with the adapter."""
    rng = np.random.default_rng(0)
    r, alpha, n = 4, 8, 64
    base = synthesize(tmp_path / "base.gguf", "llama", tokenizer="spm", n_kv_heads=4, layers=1, n_embd=n)
    a, b = (rng.standard_normal((n, r)).astype("<f4") * 0.3 for _ in range(2))
    out = bytearray(struct.pack("<4sIii", b"algg", 1, r, alpha))
    for letter, half in (("A", a), ("B", b)):
        name = f"layers.0.attention.wq.weight.lora{letter}".encode()
        out += struct.pack("<iiI2i", 2, len(name), 0, r, n) + name + bytes(-(len(out) + 20 + len(name)) % 32)
        out += half.tobytes()
    (tmp_path / "lora.bin").write_bytes(out)
    with files.open(tmp_path / "lora.bin") as adapter:
        files.convert(adapter, tmp_path / "lora.gguf")
    with files.open(base) as model:
        contents = files.contents_of(model)
        old = contents.tensors["blk.0.attn_q.weight"]
        merged = (old.dequantize() + alpha / r * b @ a.T).astype("<f4")
        contents.tensors[old.name] = files.Tensor.from_bytes(old.name, old.type, old.shape, merged)
        files.writer.write_gguf(tmp_path / "merged.gguf", contents.metadata, contents.tensors.values())
    script = tmp_path / "run.py"
    script.write_text(RUN)

    def logits(*arguments: Path) -> np.ndarray:
        done = subprocess.run(
            [sys.executable, script, *map(str, arguments)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return np.array(json.loads(done.stdout.splitlines()[-1]))

    with_adapter = logits(base, tmp_path / "lora.gguf")
    expected, plain = logits(tmp_path / "merged.gguf"), logits(base)
    assert np.abs(with_adapter - expected).max() < 1e-3 * np.abs(expected).max()
    assert np.abs(with_adapter - plain).max() > 0.05 * np.abs(expected).max()


RUN = """
import ctypes, json, sys
import llama_cpp as lc
silent = lc.llama_log_callback(lambda *a: None)
lc.llama_log_set(silent, ctypes.c_void_p(0))
lc.llama_backend_init()
model = lc.llama_model_load_from_file(sys.argv[1].encode(), lc.llama_model_default_params())
params = lc.llama_context_default_params()
params.n_ctx, params.n_threads, params.n_threads_batch, params.flash_attn_type = 64, 1, 1, 0
params.type_k = params.type_v = 0
context = lc.llama_init_from_model(model, params)
if len(sys.argv) > 2:
    adapter = lc.llama_adapter_lora_init(model, sys.argv[2].encode())
    assert adapter
    adapters, scales = (lc.llama_adapter_lora_p_ctypes * 1)(adapter), (ctypes.c_float * 1)(1.0)
    assert lc.llama_set_adapters_lora(context, adapters, 1, scales) == 0
tokens = [1, 300, 280, 310]
assert lc.llama_decode(context, lc.llama_batch_get_one((lc.llama_token * 4)(*tokens), 4)) == 0
n_vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(model))
print(json.dumps(lc.llama_get_logits_ith(context, -1)[:n_vocab]))
"""
