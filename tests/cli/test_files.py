from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from llamaherd import files
from llamaherd.cli.files import register
from llamaherd.files.metadata import TypedValue, ValueType
from llamaherd.files.synthesize import make_tiny_model, synthesize
from llamaherd.files.writer import write_gguf

app = typer.Typer()
register(app)


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.output


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
    assert "one of general.architecture" in run("inspect", model, "--metadata", "nothing", code=1)


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
    assert "iq4_xs" in run("convert", source, tmp_path / "d.gguf", "--type", "q9", code=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "b.gguf", "c.bin"]


def test_errors_are_one_line(tmp_path: Path, model: Path) -> None:
    assert "error: " in run("inspect", tmp_path / "nothing.gguf", code=1)
    (tmp_path / "junk").write_bytes(b"junk" * 9)
    assert "not those of a model file" in run("inspect", tmp_path / "junk", code=1)
    assert "one of gguf" in run("convert", model, tmp_path / "x", "--to", "onnx", code=1)
    assert "only of use" in run("convert", model, tmp_path / "x", "--imatrix", model, code=1)
