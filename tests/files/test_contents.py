from __future__ import annotations

import struct
from pathlib import Path

import pytest

from llamaherd import files
from llamaherd.errors import MalformedFileError, UnsupportedFileError
from llamaherd.files.contents import attention_rows
from llamaherd.files.synthesize import synthesize


def test_rows_of_fused_attention_by_hand() -> None:
    # two heads of two: the older file has q0 k0 v0 q1 k1 v1, GGUF q0 q1 k0 k1 v0 v1
    found = attention_rows("gptneox", 4, 2, 2)
    assert found is not None
    assert found.tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    # four heads of one in two groups: q0 q1 k0 v0 | q2 q3 k1 v1
    found = attention_rows("falcon", 4, 4, 2)
    assert found is not None
    assert found.tolist() == [0, 1, 4, 5, 2, 6, 3, 7]
    assert attention_rows("falcon", 4, 4, 1) is None
    assert attention_rows("mpt", 4, 2, 2) is None


def test_todays_blocks_are_passed_on_as_views(tmp_path: Path) -> None:
    source = synthesize(tmp_path / "a.gguf", "llama", tokenizer="spm", n_kv_heads=4, type="q8_0")
    with files.open(source) as model:
        files.convert(model, tmp_path / "b.bin", to="ggjt", sync=False)
    with files.open(tmp_path / "b.bin") as old:
        contents = files.contents_of(old)
        base = old.parts[0].data.ctypes.data
        for name, tensor in contents.tensors.items():
            assert tensor.offset is not None, name
            assert tensor.raw.ctypes.data == base + tensor.offset
        assert contents.values()["llama.feed_forward_length"] == 128  # from w1's rows


def test_defaults_go_by_the_containers_age(tmp_path: Path) -> None:
    source = synthesize(tmp_path / "a.gguf", "llama", tokenizer="spm", n_kv_heads=4)
    for to, epsilon in (("ggml", 1e-6), ("ggjt1", 1e-6), ("ggjt2", 1e-6), ("ggjt3", 5e-6)):
        with files.open(source) as model:
            files.convert(model, tmp_path / to, to=to, sync=False)
        with files.open(tmp_path / to) as old:
            values = files.contents_of(old).values()
            assert values["llama.attention.layer_norm_rms_epsilon"] == epsilon
            assert values["llama.context_length"] == 2048
            given = files.contents_of(old, assume=files.Assumptions(n_ctx=99, rope_base=5e5)).values()
            assert (given["llama.context_length"], given["llama.rope.freq_base"]) == (99, 5e5)


def test_two_numbers_of_tokens_must_agree(tmp_path: Path) -> None:
    head = b"lmgg" + struct.pack("<7i", 1, 8, 8, 1, 1, 0, 2) + struct.pack("<I", 1) + b"a"
    record = struct.pack("<iiIi", 1, 12, 0, 1) + b"model/ln_f/g" + bytes(4)
    (tmp_path / "x.bin").write_bytes(head + record)
    with pytest.raises(MalformedFileError, match="n_vocab = 1 and 2"):
        files.open(tmp_path / "x.bin", architecture="gpt2")


def test_gptj_is_read_and_not_run(tmp_path: Path) -> None:
    head = b"lmgg" + struct.pack("<8i", 1, 8, 8, 1, 1, 8, 0, 1) + struct.pack("<I", 1) + b"a"
    record = struct.pack("<iiIi", 1, 23, 0, 1) + b"transformer.ln_f.weight" + bytes(4)
    (tmp_path / "x.bin").write_bytes(head + record)
    with files.open(tmp_path / "x.bin") as model:
        assert model.architecture == "gptj"
        assert list(model.tensors) == ["transformer.ln_f.weight"]
        with pytest.raises(UnsupportedFileError, match="GPT-J"):
            files.contents_of(model)
