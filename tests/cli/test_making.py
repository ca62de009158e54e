from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import pytest

from llamaherd import files
from llamaherd.cli import main
from llamaherd.cli.sizes import format_size, parse_size
from llamaherd.errors import InvalidParameterError


def run(*arguments: object, code: int = 0) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        found = main([str(argument) for argument in arguments])
    assert found == code, output.getvalue()
    return output.getvalue()


def test_synthesize_takes_its_sizes_from_the_line(tmp_path: Path) -> None:
    target = tmp_path / "m.gguf"
    output = run(
        "synthesize", target, "--arch", "qwen2", "--layers", 3, "--type", "q8_0", "--vocab", 400, "--tied"
    )
    assert "m.gguf" in output
    with files.open(target) as model:
        assert model.architecture == "qwen2"
        assert model.metadata["qwen2.block_count"] == 3
        assert model.tensors["token_embd.weight"].shape == (64, 400)
        assert model.tensors["token_embd.weight"].type.name == "q8_0"
        assert "output.weight" not in model.tensors


def test_synthesize_lists_the_architectures() -> None:
    output = run("synthesize", "--list")
    assert "gptneox" in output
    assert "refused" in output


@pytest.mark.parametrize("container", ["ggml", "ggmf", "ggjt", "ggjt1"])
def test_synthesize_writes_older_containers(container: str, tmp_path: Path) -> None:
    target = tmp_path / "m.bin"
    run("synthesize", target, "--format", container, "--tokenizer", "spm", "--kv-heads", 4)
    with files.open(target) as model:
        assert container.startswith(model.container)
        assert model.architecture == "llama"


def test_types_of_libllama_s_quantiser_go_through_it(tmp_path: Path) -> None:
    run("synthesize", tmp_path / "m.gguf", "--embd", 256, "--type", "q4_k_m")
    with files.open(tmp_path / "m.gguf") as model:
        assert {"q4_k", "q6_k"} <= {tensor.type.name for tensor in model.tensors.values()}
    assert os.listdir(tmp_path) == ["m.gguf"]
    assert "type" in run("synthesize", tmp_path / "x.gguf", "--type", "q9_z", code=2)
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_synthesize_splits(tmp_path: Path) -> None:
    run("synthesize", tmp_path / "m.gguf", "--split-size", "100k")
    assert len(os.listdir(tmp_path)) > 1
    assert all("-of-" in name for name in os.listdir(tmp_path))


def test_errors_are_one_line(tmp_path: Path) -> None:
    output = run("synthesize", tmp_path / "m.gguf", "--arch", "lama", code=2)
    assert output.startswith("error: architecture = 'lama' is not valid: one of ")
    assert output.count("\n") == 1
    assert "no such model file" in run("slice", tmp_path / "none.gguf", 0, 1, tmp_path / "s.gguf", code=1)
    run("synthesize", code=2)


def test_slice_writes_the_layers(tmp_path: Path) -> None:
    run("synthesize", tmp_path / "m.gguf", "--layers", 4)
    run("slice", tmp_path / "m.gguf", 1, 3, tmp_path / "s.gguf")
    with files.open(tmp_path / "s.gguf") as model:
        assert model.metadata["llama.block_count"] == 2
        assert model.metadata["llamaherd.slice.start"] == 1
    assert "is not valid" in run("slice", tmp_path / "m.gguf", 3, 1, tmp_path / "x.gguf", code=2)


def test_slice_check_proves_it(tmp_path: Path) -> None:
    run("synthesize", tmp_path / "m.gguf", "--layers", 4, "--arch", "gemma3")
    for start, end in ((1, 3), (0, 2), (2, 4), (0, 4)):
        output = run("slice", tmp_path / "m.gguf", start, end, tmp_path / "s.gguf", "--check")
        assert "bit-exact: max |Δlogit| = 0 over" in output
    assert sorted(os.listdir(tmp_path)) == ["m.gguf", "s.gguf"]


def test_slice_check_tells_when_it_is_not_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamaherd.files.slice.UNCUTTABLE", {})
    run("synthesize", tmp_path / "m.gguf", "--layers", 4, "--arch", "gemma")
    output = run("slice", tmp_path / "m.gguf", 1, 3, tmp_path / "s.gguf", "--check", "--unlisted", code=1)
    assert "NOT exact" in output


def test_torch_and_back(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    run("synthesize", tmp_path / "m.gguf")
    assert "model.safetensors" in run("export-torch", tmp_path / "m.gguf", tmp_path / "torch")
    run("import-torch", tmp_path / "torch", tmp_path / "back.gguf", "--type", "f32")
    with files.open(tmp_path / "m.gguf") as before, files.open(tmp_path / "back.gguf") as after:
        for name, tensor in before.tensors.items():
            assert tensor.raw.tobytes() == after.tensors[name].raw.tobytes()
    run("import-torch", tmp_path / "torch", tmp_path / "small.gguf", "--type", "q8_0")
    assert files.open(tmp_path / "small.gguf").tensors["blk.0.attn_q.weight"].type.name == "q8_0"


@pytest.mark.parametrize(
    ("text", "size"),
    [("2G", 2 << 30), ("512M", 512 << 20), ("1.5k", 1536), ("4096", 4096), ("2 GiB", 2 << 30)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "2X", "G", "1e3"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidParameterError, match="a size such as"):
        parse_size(text)


def test_sizes_are_written() -> None:
    assert [format_size(n) for n in (0, 1023, 1536, 104 << 20, 5 << 40)] == [
        "0 B", "1023 B", "1.5 KiB", "104 MiB", "5120 GiB",
    ]  # fmt: skip
