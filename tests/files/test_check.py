from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.files.stock_llama import StockLlama, StockLlamaDiedError
from tests.files.variations import write_variation

from llamaherd import files
from llamaherd.errors import ModelNotFoundError
from llamaherd.files.architectures import ARCHITECTURES
from llamaherd.files.metadata import TypedValue, ValueType
from llamaherd.files.synthesize import make_tiny_model, synthesize
from llamaherd.files.writer import write_gguf


def errors(path: Path) -> list[str]:
    return [str(fault) for fault in files.check(path) if fault.severity == "error"]


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_good_files_have_no_faults(tmp_path: Path, architecture: str) -> None:
    assert files.check(synthesize(tmp_path / "x.gguf", architecture)) == []


def test_all_faults_are_listed_not_only_the_first(tmp_path: Path) -> None:
    model = make_tiny_model(defects=["nan-weights", "duplicate-token"])
    metadata: dict[str, Any] = {
        **model.metadata,
        "llama.expert_used_count": 3,
        "llama.rope.scaling.type": "odd",
    }
    del metadata["llama.context_length"]
    tensors = [tensor for tensor in model.tensors if tensor.name != "blk.1.ffn_up.weight"]
    write_gguf(tmp_path / "x.gguf", metadata, tensors)
    found = "\n".join(errors(tmp_path / "x.gguf"))
    for expected in (
        "NaN",
        "entries with one text",
        "llama.expert_count",
        "rope.scaling.type: is 'odd'",
        "context_length: is missing",
        "blk.1.ffn_up.weight: the tensor is missing",
    ):
        assert expected in found
    assert files.check(tmp_path / "x.gguf", weights=False) != files.check(tmp_path / "x.gguf")


def change(model: Any, **values: Any) -> dict[str, Any]:
    return {**model.metadata, **{key.replace("__", "."): value for key, value in values.items()}}


ABORTS: dict[str, dict[str, Any]] = {
    "no layers": {"llama__block_count": 0},
    "too many layers": {"llama__block_count": 513},
    "more layers used than there are": {"llama__nextn_predict_layers": 3},
    "experts used without any": {"llama__expert_used_count": 1},
    "more experts than libllama can": {"llama__expert_count": 5000, "llama__expert_used_count": 1},
    "an unknown rope scaling": {"llama__rope__scaling__type": "cubic"},
    "a WordPiece tokenizer with byte tokens": {
        "tokenizer__ggml__model": "bert",
        "tokenizer__ggml__token_type": TypedValue(
            ValueType.ARRAY, np.full(320, 6, np.int32), ValueType.INT32
        ),
    },
}


@pytest.mark.parametrize("case", [*ABORTS, "two entries of one text"])
def test_what_aborts_libllama_is_an_error(tmp_path: Path, case: str, stock_llama: StockLlama) -> None:
    """Each of these kills the process that loads the file: shown by loading it."""
    model = make_tiny_model(defects=["duplicate-token"] if case == "two entries of one text" else [])
    write_gguf(tmp_path / "x.gguf", change(model, **ABORTS.get(case, {})), model.tensors)
    assert errors(tmp_path / "x.gguf")
    with pytest.raises(StockLlamaDiedError):
        stock_llama.ask(path=str(tmp_path / "x.gguf"))


def test_what_passes_loads_without_an_abort(tmp_path: Path, stock_llama: StockLlama) -> None:
    assert run_variations(tmp_path, stock_llama, 400, seed=11)["loaded"] > 50


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
def test_what_passes_loads_without_an_abort_often(tmp_path: Path, stock_llama: StockLlama) -> None:
    print(run_variations(tmp_path, stock_llama, 20_000, seed=12))


def run_variations(folder: Path, stock_llama: StockLlama, count: int, seed: int) -> Counter[str]:
    dice = random.Random(seed)
    options: dict[str, Any] = {"layers": 1, "n_embd": 64, "n_heads": 2, "n_ctx": 64}
    models = [
        make_tiny_model(architecture, **{**options, **more})
        for architecture, more in (
            ("llama", {"tokenizer": "spm"}),
            ("llama", {"type": "q8_0"}),
            ("qwen2", {}),
            ("mixtral", {}),
            ("gptneox", {}),
            ("gemma2", {}),
            ("gemma3", {}),
            ("falcon", {}),
            ("bert", {}),
            ("mamba", {}),
            ("t5", {}),
        )
    ]
    outcome: Counter[str] = Counter()
    path = folder / "x.gguf"
    for turn in range(count):
        model = dice.choice(models)
        if dice.random() < 0.2:
            name = dice.choice(("llama", "bert", "t5", "rwkv", "plamo2", "gemma4", "gpt2", "none", "test"))
            model = replace(model, metadata={**model.metadata, "tokenizer.ggml.model": name})
        said = write_variation(dice, model, path)
        if errors(path):
            outcome["refused by check"] += 1
            continue
        try:
            answer = stock_llama.ask(path=str(path))
        except StockLlamaDiedError:
            pytest.fail(
                f"seed {seed}, turn {turn}: {model.architecture} with {said} passes, and aborts libllama"
            )
        outcome["loaded" if answer.get("loaded") else "refused by libllama"] += 1
    return outcome


@pytest.mark.parametrize("type", ["f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "tq2_0"])
def test_nan_and_infinite_scales_are_found_in_any_type(tmp_path: Path, type: str) -> None:
    model = make_tiny_model(n_embd=256, n_ff=256, type=type)
    path = tmp_path / "x.gguf"
    write_gguf(path, model.metadata, model.tensors)
    with files.open(path) as opened:
        tensor = opened.tensors["blk.1.ffn_down.weight"]
        scale_at = {"tq2_0": 64}.get(type, 0)
        offset = (tensor.offset or 0) + 3 * tensor.type.block_bytes + scale_at
        assert str(tensor.type) == type
    for bits, word in ((b"\x00\x7c", "infinite"), (b"\x00\x7e", "NaN")):
        data = bytearray(path.read_bytes())
        if type in ("f32", "bf16"):
            bits = {"infinite": b"\x80\x7f", "NaN": b"\xc0\x7f"}[word]
            bits = b"\0\0" + bits if type == "f32" else bits
        data[offset : offset + len(bits)] = bits
        (tmp_path / "y.gguf").write_bytes(data)
        found = errors(tmp_path / "y.gguf")
        assert len(found) == 1
        assert f"1 {'weights' if type in ('f32', 'f16', 'bf16') else 'scales'} are {word}" in found[0]
        assert "blk.1.ffn_down.weight" in found[0]


def test_layout_that_libllama_refuses_is_found(tmp_path: Path, stock_llama: StockLlama) -> None:
    """Two tensors exchanged in the data, not in the header: readable, but not in order."""
    model = make_tiny_model()
    write_gguf(tmp_path / "x.gguf", model.metadata, model.tensors)
    data = (tmp_path / "x.gguf").read_bytes()
    name = b"blk.0.attn_k.weight"
    at = data.index(name) + len(name) + 4 + 16 + 4
    other = data.index(b"blk.0.attn_v.weight") + len(name) + 4 + 16 + 4
    swapped = bytearray(data)
    swapped[at : at + 8], swapped[other : other + 8] = data[other : other + 8], data[at : at + 8]
    (tmp_path / "y.gguf").write_bytes(swapped)
    with files.open(tmp_path / "y.gguf") as opened:  # reading it is no problem
        assert len(opened.tensors) == len(model.tensors)
    assert any("libllama expects them" in error for error in errors(tmp_path / "y.gguf"))
    assert not stock_llama.ask(path=str(tmp_path / "y.gguf"))["loaded"]


def test_older_files_are_checked_too(tmp_path: Path) -> None:
    source = synthesize(tmp_path / "a.gguf", "llama", tokenizer="spm", n_kv_heads=4, type="q4_0")
    with files.open(source) as model:
        files.convert(model, tmp_path / "b.bin", to="ggjt1")
    assert files.check(tmp_path / "b.bin") == []
    data = bytearray((tmp_path / "b.bin").read_bytes())
    with files.open(tmp_path / "b.bin") as model:
        offset = model.tensors["layers.0.attention.wq.weight"].offset or 0
    data[offset : offset + 4] = np.array([np.inf], "<f4").tobytes()
    (tmp_path / "b.bin").write_bytes(data)
    assert ["layers.0.attention.wq.weight" in error for error in errors(tmp_path / "b.bin")] == [True]


def test_progress_and_missing_files(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    files.check(synthesize(tmp_path / "x.gguf"), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    with pytest.raises(ModelNotFoundError):
        files.check(tmp_path / "nothing")
