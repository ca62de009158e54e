from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from llamaherd import files
from llamaherd.cli import main
from llamaherd.files.metadata import TypedValue, ValueType
from llamaherd.files.synthesize import make_tiny_model, synthesize
from llamaherd.files.writer import write_gguf


def run(*arguments: object, code: int = 0) -> str:
    """What the command prints, to either stream."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert main([str(argument) for argument in arguments]) == code, out.getvalue() + err.getvalue()
    return out.getvalue() + err.getvalue()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return synthesize(tmp_path / "m.gguf", "llama", tokenizer="spm", n_kv_heads=4, n_ff=192, type="q8_0")


def test_inspect_shows_what_one_wants_to_know(model: Path) -> None:
    out = run("inspect", model)
    for expected in (
        "gguf-3",
        "llama",
        "tiny random llama",
        "q8_0",
        "█",
        "448 entries",
        "KV cache",
        "chat template",
    ):
        assert expected in out


def test_inspect_json_holds_it_all(model: Path) -> None:
    out = json.loads(run("inspect", model, "--json", "--tensors", "--ctx", 512))
    assert (out["container"], out["architecture"], out["vocabulary"]) == ("gguf-3", "llama", 448)
    assert out["metadata"]["llama.block_count"] == 2
    assert out["metadata"]["tokenizer.ggml.tokens"] == {"length": 448}
    # 2 layers, 4 heads, 16 numbers each for keys and values, 2 bytes each
    assert out["memory"] == {
        "n_ctx": 512,
        "weights": out["memory"]["weights"],
        "kv_cache": 512 * 2 * 4 * 32 * 2,
    }
    with files.open(model) as opened:
        assert {row["name"]: row["offset"] for row in out["tensor_list"]} == {
            name: tensor.offset for name, tensor in opened.tensors.items()
        }
    assert sum(share["nbytes"] for share in out["types"]) == out["memory"]["weights"]


def test_inspect_prints_one_value(model: Path) -> None:
    assert run("inspect", model, "--metadata", "llama.block_count").strip() == "2"
    assert json.loads(run("inspect", model, "--metadata", "tokenizer.ggml.tokens", "--json"))[1] == "<s>"
    assert "tokenizer.ggml.tokens = 448 x string" in run("inspect", model, "--metadata", "all")
    assert "one of general.architecture" in run("inspect", model, "--metadata", "nothing", code=2)


def test_inspect_lists_tensors(model: Path) -> None:
    assert "blk.1.ffn_down.weight" in run("inspect", model, "--tensors")


def test_check_lists_faults_and_fails(tmp_path: Path, model: Path) -> None:
    assert "0 errors" in run("inspect", model, "--check")
    broken = make_tiny_model(defects=["nan-weights", "duplicate-token"])
    write_gguf(tmp_path / "b.gguf", broken.metadata, broken.tensors)
    out = run("inspect", tmp_path / "b.gguf", "--check", code=1)
    assert "NaN" in out
    assert "2 errors" in out
    faults = json.loads(run("inspect", tmp_path / "b.gguf", "--check", "--json", code=1))
    assert {fault["severity"] for fault in faults} == {"error"}


def test_svg_covers_the_file(tmp_path: Path, model: Path) -> None:
    run("inspect", model, "--svg", tmp_path / "x.svg")
    root = ElementTree.parse(tmp_path / "x.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    drawn = [rect for rect in root.iter(f"{space}rect") if rect.find(f"{space}title") is not None]
    area = sum(float(rect.get("width") or 0) for rect in drawn)
    assert area == pytest.approx(1024 * 48, rel=0.01)  # all of the file is drawn, nothing twice
    titles = {(rect.find(f"{space}title").text or "").split(":")[0] for rect in drawn}  # type: ignore[union-attr]
    with files.open(model) as opened:
        assert set(opened.tensors) <= titles


def test_other_containers_are_inspected_too(tmp_path: Path, model: Path) -> None:
    run("convert", model, tmp_path / "old.bin", "--to", "ggjt1")
    out = run("inspect", tmp_path / "old.bin")
    assert "ggjt-1" in out
    assert "q8_0/v1" in out
    assert "0 errors" in run("inspect", tmp_path / "old.bin", "--check")


def test_odd_metadata_does_not_break_the_display(tmp_path: Path) -> None:
    tiny = make_tiny_model()
    odd = {
        **tiny.metadata,
        "general.name": "[bold]not markup[/bold]",
        "a.bytes": TypedValue(ValueType.STRING, b"\xff"),
        "a.mixed": TypedValue(ValueType.ARRAY, np.array([1, 2], np.int8), ValueType.INT8),
    }
    write_gguf(tmp_path / "x.gguf", odd, tiny.tensors)
    assert "[bold]not markup[/bold]" in run("inspect", tmp_path / "x.gguf")
    assert run("inspect", tmp_path / "x.gguf", "--metadata", "a.bytes").strip() == "0xff"
    json.loads(run("inspect", tmp_path / "x.gguf", "--json"))


def test_convert_writes_and_says_what_it_did(tmp_path: Path, model: Path) -> None:
    out = run("convert", model, tmp_path / "b.bin", "--to", "ggjt")
    assert "lossless" in out
    assert "no place for" in out
    run("convert", tmp_path / "b.bin", tmp_path / "c.gguf", "--rms-epsilon", "1e-5", "--ctx", "512")
    with files.open(model) as a, files.open(tmp_path / "c.gguf") as b:
        assert b.metadata["llama.context_length"] == 512
        for name, tensor in a.tensors.items():
            np.testing.assert_array_equal(b.tensors[name].raw, tensor.raw)
    assert "rounded" in run("convert", model, tmp_path / "d.gguf", "--type", "f16")
    out = run("convert", model, tmp_path / "e.gguf", "--split-size", "40k")
    assert "-00001-of-" in out


def test_convert_quantises_through_libllama(tmp_path: Path) -> None:
    source = synthesize(tmp_path / "a.gguf", "llama", n_embd=256, n_ff=512, tokenizer="spm", n_kv_heads=4)
    assert "quantised to q4_k_m" in run("convert", source, tmp_path / "b.gguf", "--type", "Q4_K_M")
    with files.open(tmp_path / "b.gguf") as model:
        assert {str(tensor.type) for tensor in model.tensors.values()} == {"f32", "q4_k", "q6_k"}
    run("convert", source, tmp_path / "c.bin", "--to", "ggjt", "--type", "q4_0")
    with files.open(tmp_path / "c.bin") as model:
        assert model.container_name == "ggjt-3"
    assert "iq4_xs" in run("convert", source, tmp_path / "d.gguf", "--type", "q9", code=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "b.gguf", "c.bin"]


def test_errors_are_one_line(tmp_path: Path, model: Path) -> None:
    assert "error: " in run("inspect", tmp_path / "nothing.gguf", code=1)
    (tmp_path / "junk").write_bytes(b"junk" * 9)
    assert "not those of a model file" in run("inspect", tmp_path / "junk", code=1)
    assert "one of gguf" in run("convert", model, tmp_path / "x", "--to", "onnx", code=2)
    assert "only of use" in run("convert", model, tmp_path / "x", "--imatrix", model, code=2)


@pytest.mark.parametrize("type", ["q4_k_m", None])
def test_ctrl_c_leaves_no_half_file(tmp_path: Path, type: str | None) -> None:
    source = synthesize(
        tmp_path / "a.gguf", "llama", layers=6, n_embd=1024, n_heads=16, n_ff=4096, type="f16"
    )
    command = [sys.executable, "-m", "llamaherd", "convert", source, tmp_path / "b.gguf"]
    with subprocess.Popen(
        [*command, *([] if type is None else ["--type", type])],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline and len(os.listdir(tmp_path)) == 1:
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    left = sorted(os.listdir(tmp_path))
    if process.returncode == 0:  # it was quicker than we
        assert left == ["a.gguf", "b.gguf"]
    else:
        assert process.returncode == 130
        assert left == ["a.gguf"]
