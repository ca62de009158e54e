from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.files.stock_llama import StockLlama

from llamaherd import files
from llamaherd.errors import FileError, InvalidParameterError, UnsupportedFileError
from llamaherd.files.convert import FORMATS
from llamaherd.files.metadata import TypedValue, ValueType
from llamaherd.files.synthesize import synthesize

LEGACY = [name for name in FORMATS if name not in ("gguf", "ggjt")]
OLD_TYPES = ("f32", "f16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
K_TYPES = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
PROMPT = [1, 300, 280, 310, 261, 275]
ASSUME = files.Assumptions(n_ctx=512, rms_epsilon=1e-5)


def tiny(path: Path, architecture: str = "llama", **options: Any) -> Path:
    """A model that the containers of then can hold."""
    if architecture == "llama":
        options = {"tokenizer": "spm", "n_kv_heads": options.get("n_heads", 4), "n_ff": 352, **options}
    if architecture == "mpt":
        options["tied"] = True
    return synthesize(path, architecture, n_embd=128, **options)


def convert(source: Path, target: Path, to: str, **options: Any) -> files.Conversion:
    with files.open(source) as model:
        return files.convert(model, target, to=to, sync=False, **options)


def assert_same_weights(one: Path, two: Path) -> None:
    with files.open(one) as a, files.open(two) as b:
        for name, tensor in a.tensors.items():
            assert b.tensors[name].type == tensor.type, name
            np.testing.assert_array_equal(b.tensors[name].raw, tensor.raw, err_msg=name)


@pytest.mark.parametrize("type", OLD_TYPES)
@pytest.mark.parametrize("to", LEGACY)
def test_every_container_and_type_comes_back_bit_for_bit(tmp_path: Path, to: str, type: str) -> None:
    source = tiny(tmp_path / "a.gguf", type=type)
    old, back = tmp_path / f"b.{to}", tmp_path / "c.gguf"
    done = convert(source, old, to)
    assert done.summary() == "lossless: no weight changed"
    with files.open(old) as model:
        assert model.architecture == "llama"
        assert model.container_name == {"ggjt3": "ggjt-3", "ggjt2": "ggjt-2", "ggjt1": "ggjt-1"}.get(
            to, "ggmf-1" if to == "ggmf" else to
        )
    assert convert(old, back, "gguf").summary() == "lossless: no weight changed"
    assert_same_weights(source, back)
    convert(old, tmp_path / "again", to)
    assert (tmp_path / "again").read_bytes() == old.read_bytes()


@pytest.mark.parametrize("architecture", ["gptneox", "gpt2", "bloom", "mpt", "falcon"])
@pytest.mark.parametrize("to", ["ggml", "ggjt3"])
def test_other_architectures_come_back(
    tmp_path: Path, to: str, architecture: str, stock_llama: StockLlama
) -> None:
    source = tiny(tmp_path / "a.gguf", architecture, type="q8_0")
    old, back = tmp_path / "b.bin", tmp_path / "c.gguf"
    convert(source, old, to)
    with files.open(old) as model:
        assert model.architecture == architecture  # told by the tensors' names
    convert(old, back, "gguf", assume=ASSUME)
    assert_same_weights(source, back)
    whole, again = (stock_llama.ask(path=str(path), prompt=PROMPT, n=8) for path in (source, back))
    assert again["loaded"], again
    np.testing.assert_allclose(again["logits"], whole["logits"], rtol=1e-3, atol=1e-4)
    assert again["generated"] == whole["generated"]


@pytest.mark.parametrize("type", OLD_TYPES)
@pytest.mark.parametrize("to", LEGACY)
def test_logits_are_those_of_the_same_weights_in_gguf(
    tmp_path: Path, to: str, type: str, stock_llama: StockLlama
) -> None:
    source = tiny(tmp_path / "a.gguf", type=type)
    convert(source, tmp_path / "b.bin", to)
    convert(tmp_path / "b.bin", tmp_path / "c.gguf", "gguf", assume=ASSUME)
    whole, again = (
        stock_llama.ask(path=str(tmp_path / name), prompt=PROMPT, n=4) for name in ("a.gguf", "c.gguf")
    )
    a, b = np.array(whole["logits"]), np.array(again["logits"])
    assert np.abs(a - b).max() <= 1e-3 * np.abs(a).max()
    cosine = (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)
    assert cosine >= 0.9998
    assert again["generated"] == whole["generated"]


@pytest.mark.parametrize("n_parts", [2, 4])
@pytest.mark.parametrize("to", ["ggml", "ggmf"])
def test_a_model_in_parts_is_one(tmp_path: Path, to: str, n_parts: int) -> None:
    source = tiny(tmp_path / "a.gguf", type="q4_0", n_heads=4, n_ff=448)
    old = tmp_path / "b.bin"
    with files.open(source) as model:
        if n_parts == 4:  # n_embd / 4 is one block of 32, but 448 / 4 is not whole blocks
            with pytest.raises(UnsupportedFileError, match="4 parts"):
                files.convert(model, old, to=to, n_parts=n_parts)
            assert list(tmp_path.iterdir()) == [source]
            return
        done = files.convert(model, old, to=to, n_parts=n_parts)
    assert [path.name for path in done.paths] == ["b.bin", "b.bin.1"]
    with files.open(old) as model:
        assert len(model.parts) == 2
    convert(old, tmp_path / "c.gguf", "gguf")
    assert_same_weights(source, tmp_path / "c.gguf")
    (tmp_path / "b.bin.1").unlink()
    with pytest.raises(FileError, match=r"b\.bin\.1"):
        files.open(old)


def test_between_eras_what_is_rounded_is_said(tmp_path: Path) -> None:
    """A scale that needs f32 is exact in GGJT 1 and 2, rounded in GGJT 3."""
    convert(tiny(tmp_path / "a.gguf", type="q4_0"), tmp_path / "one", "ggjt1")
    data = bytearray((tmp_path / "one").read_bytes())
    with files.open(tmp_path / "one") as model:
        offset = model.tensors["layers.0.attention.wq.weight"].offset
    assert offset is not None
    data[offset : offset + 4] = np.array([0.1], "<f4").tobytes()
    (tmp_path / "fine").write_bytes(data)
    assert convert(tmp_path / "fine", tmp_path / "two", "ggjt2").summary().startswith("lossless")
    convert(tmp_path / "two", tmp_path / "back", "ggjt1")
    assert (tmp_path / "back").read_bytes() == bytes(data)
    done = convert(tmp_path / "fine", tmp_path / "three", "ggjt3")
    assert done.roundings["layers.0.attention.wq.weight"].changed == 1
    assert "1 of" in done.summary()


def test_q4_2_becomes_f16_and_says_so(tmp_path: Path) -> None:
    """No writer of ours makes q4_2: the type number of a q4_0 tensor of the same size is changed."""
    convert(tiny(tmp_path / "a.gguf", type="q4_0"), tmp_path / "one", "ggjt1")
    data = bytearray((tmp_path / "one").read_bytes())
    name = b"layers.0.attention.wq.weight"
    at = data.index(name)
    data[at - 12 : at - 8] = (4).to_bytes(4, "little")  # 20 bytes for 32 weights either way
    with files.open(tmp_path / "one") as model:
        start, size = model.tensors[name.decode()].offset or 0, model.tensors[name.decode()].nbytes
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (size // 10, 10), np.uint8)
    blocks[:, :2] = rng.uniform(0.01, 0.1, size // 10).astype("<f2").view(np.uint8).reshape(-1, 2)
    data[start : start + size] = blocks.tobytes()
    (tmp_path / "q4_2").write_bytes(data)
    with files.open(tmp_path / "q4_2") as model:
        tensor = model.tensors[name.decode()]
        assert str(tensor.type) == "q4_2/v1"
        weights = tensor.dequantize()
        assert weights[0, 0] == np.float32(blocks[0, :2].view("<f2")[0]) * (int(blocks[0, 2] & 15) - 8)
        for exact, kind, tolerance in ((False, "f16", 2**-11), (True, "f32", 0.0)):
            contents = files.contents_of(model, exact=exact)
            new = contents.tensors["blk.0.attn_q.weight"]
            assert str(new.type) == kind
            np.testing.assert_allclose(new.dequantize(), weights, rtol=tolerance)
            assert "becomes" in contents.notes[0]


@pytest.mark.parametrize("type", ["f32", "f16", "bf16"])
def test_float_types(tmp_path: Path, type: str, stock_llama: StockLlama) -> None:
    source = tiny(tmp_path / "a.gguf", type="f32")
    done = convert(source, tmp_path / "b.gguf", "gguf", type=type)
    with files.open(tmp_path / "b.gguf") as model:
        assert str(model.tensors["blk.0.attn_q.weight"].type) == type
        assert str(model.tensors["blk.0.attn_norm.weight"].type) == "f32"
    assert done.summary().startswith("lossless") == (type == "f32")
    whole, again = (
        stock_llama.ask(path=str(tmp_path / name), prompt=PROMPT) for name in ("a.gguf", "b.gguf")
    )
    a, b = np.array(whole["logits"]), np.array(again["logits"])
    assert (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b) > 0.999


def test_quantised_types_go_through_the_given_quantiser(tmp_path: Path) -> None:
    source = tiny(tmp_path / "a.gguf", type="f16")
    asked = []

    def quantize(plain: Path, made: Path, type: str) -> None:
        asked.append(type)
        tiny(made, type="q8_0")

    done = convert(source, tmp_path / "b.bin", "ggjt", type="Q8_0", quantize=quantize)
    assert asked == ["q8_0"]
    assert done.summary() == "quantised to q8_0 by libllama"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "b.bin"]
    with pytest.raises(InvalidParameterError, match="libllama"):
        convert(source, tmp_path / "c.gguf", "gguf", type="q8_0")


# ------------------------------------------------------------------------------ what is refused


def test_what_a_container_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    def refused(architecture: str, to: str, match: str, **options: Any) -> None:
        source = synthesize(tmp_path / "a.gguf", architecture, **options)
        with pytest.raises(UnsupportedFileError, match=match):
            convert(source, tmp_path / "b.bin", to)
        assert not (tmp_path / "b.bin").exists()

    refused("qwen3", "ggjt", "qwen3")
    refused("llama", "ggjt", "vocabulary", tokenizer="bpe", n_kv_heads=4)
    refused("llama", "ggjt3", "bf16", tokenizer="spm", type="bf16")
    refused("mixtral", "ggml", "ffn_gate_inp", tokenizer="spm")
    refused("llama", "ggjt", "tq1_0", tokenizer="spm", n_embd=256, n_ff=512, type="tq1_0")


def test_what_readers_cannot_know_is_noted(tmp_path: Path) -> None:
    source = synthesize(tmp_path / "a.gguf", "llama", tokenizer="spm", n_kv_heads=2, tied=True)
    notes = "\n".join(convert(source, tmp_path / "b.bin", "ggjt").notes)
    for expected in (
        "n_head_kv (2 here, 4 heads)",
        "n_ff = 128",
        "written out a second time",
        "chat_template",
    ):
        assert expected in notes
    with files.open(tmp_path / "b.bin") as model:  # our own reader takes it from wk's rows
        assert files.contents_of(model).values()["llama.attention.head_count_kv"] == 2


@pytest.mark.parametrize("n_ff", [352, 2**31 - 1])
def test_n_mult_gives_n_ff_as_readers_compute_it(tmp_path: Path, n_ff: int) -> None:
    """Also, and at once, where the metadata lie about the tensors."""
    with files.open(tiny(tmp_path / "a.gguf")) as model:
        contents = files.contents_of(model)
        contents.metadata["llama.feed_forward_length"] = TypedValue(ValueType.UINT32, n_ff)
        start = time.process_time()
        files.legacy_writer.write_legacy(tmp_path / "b.bin", contents, sync=False)
        assert time.process_time() - start < 10  # a search one by one takes minutes
    with files.open(tmp_path / "b.bin") as model:
        n_mult: Any = model.metadata["n_mult"]
        assert (2 * (4 * 128) // 3 + n_mult - 1) // n_mult * n_mult == n_ff


def test_k_quants_fit_ggjt_3_only(tmp_path: Path) -> None:
    with files.open(tiny(tmp_path / "a.gguf", type="f32")) as model:
        contents = files.contents_of(model)
        kind = files.block_types.named_type("q4_k")
        name = "blk.0.ffn_down.weight"
        raw = np.zeros(kind.nbytes((256, 4)), np.uint8)
        contents.tensors[name] = files.Tensor.from_bytes(name, kind, (256, 4), raw)
        files.legacy_writer.write_legacy(tmp_path / "b.bin", contents, container="ggjt", version=3)
        with pytest.raises(UnsupportedFileError, match="q4_k"):
            files.legacy_writer.write_legacy(tmp_path / "c.bin", contents, container="ggjt", version=2)


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    source = tiny(tmp_path / "a.gguf")
    with pytest.raises(InvalidParameterError, match="gguf, ggjt"):
        convert(source, tmp_path / "b", "safetensors")
    with pytest.raises(InvalidParameterError, match="being read"):
        convert(source, source, "gguf")
    with pytest.raises(FileError, match="does not exist"):
        convert(source, tmp_path / "nowhere" / "b", "gguf")


# ------------------------------------------------------------------------------------ atomicity


@pytest.mark.parametrize("to", ["gguf", "ggjt", "ggml"])
def test_interrupting_leaves_nothing_behind(tmp_path: Path, to: str) -> None:
    source = tiny(tmp_path / "a.gguf")
    target = tmp_path / "b.bin"
    target.write_bytes(b"the old one")

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, target, to, progress=interrupt)
    assert target.read_bytes() == b"the old one"
    assert sorted(os.listdir(tmp_path)) == ["a.gguf", "b.bin"]


@pytest.mark.parametrize("to", ["gguf", "ggjt", "ggmf"])
def test_progress_ends_at_the_total(tmp_path: Path, to: str) -> None:
    seen: list[tuple[int, int]] = []
    convert(
        tiny(tmp_path / "a.gguf"), tmp_path / "b", to, progress=lambda done, total: seen.append((done, total))
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert 0.99 < seen[-1][0] / seen[-1][1] <= 1


def test_a_full_disk_is_noticed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny(tmp_path / "a.gguf")
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("llamaherd.files.atomic.shutil.disk_usage", lambda folder: usage)
    for to in ("gguf", "ggjt"):
        with pytest.raises(FileError, match="make room"):
            convert(source, tmp_path / "b", to)
    assert os.listdir(tmp_path) == ["a.gguf"]
