from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.conftest import Run

from llamaherd.files.synthesize import synthesize


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return synthesize(tmp_path / "m.gguf", "llama", layers=5, n_ctx=512)


@pytest.fixture(autouse=True)
def own_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    environment["LLAMAHERD_SLICES"] = str(tmp_path / "slices")


def test_plan_of_a_file(llamaherd: Run, model: Path, tmp_path: Path) -> None:
    size = model.stat().st_size
    nodes = f"a:{size + (20 << 20)},b:{size + (20 << 20)}@40"
    done = llamaherd(
        "plan", model, "--nodes", nodes, "--n-ctx", 256, "--json", "--svg", tmp_path / "plan.svg"
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["cuts"][0] == 0
    assert answer["cuts"][-1] == 5
    assert [s["node"] for s in answer["stages"]] == ["a", "b"]
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")
    shown = llamaherd("plan", model, "--nodes", nodes)
    assert "predicted:" in shown.stdout
    assert "layers   0 -" in shown.stdout


def test_plan_on_paper(llamaherd: Run) -> None:
    done = llamaherd(
        "plan", "llama:layers=126,n_embd=16384,n_heads=128,n_kv_heads=8,n_ff=53248", "--nodes", "40x8G"
    )
    assert done.returncode == 0, done.stderr
    assert "not needed: node" in done.stdout


@pytest.mark.parametrize("nodes", ["", "a", "a:", "a:-3G", "a:1G@fast", "0x1G", "a:1G@-2"])
def test_bad_nodes(llamaherd: Run, model: Path, nodes: str) -> None:
    done = llamaherd("plan", model, "--nodes", nodes)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_too_little_memory_says_so(llamaherd: Run, model: Path) -> None:
    done = llamaherd("plan", model, "--nodes", "a:10k")
    assert done.returncode == 1
    assert "needs" in done.stderr


def test_stages_give_the_same_text(llamaherd: Run, model: Path) -> None:
    question = ["run", model, "once", "--max-tokens", 12, "--seed", 3, "--set", "n_threads=1"]
    whole = llamaherd(*question)
    cut = llamaherd(*question, "--stages", 3)
    assert cut.returncode == 0, cut.stderr
    assert cut.stdout == whole.stdout
    assert cut.stdout


def test_suggestions_and_perplexity_over_stages(llamaherd: Run, model: Path, tmp_path: Path) -> None:
    ask = [
        "suggest",
        model,
        "once",
        "--n",
        4,
        "--max-tokens",
        6,
        "--seed",
        7,
        "--json",
        "--set",
        "n_threads=1",
    ]
    whole, cut = (json.loads(llamaherd(*ask, *more).stdout) for more in ([], ["--stages", 2]))
    assert [s["tokens"] for s in cut["suggestions"]] == [s["tokens"] for s in whole["suggestions"]]
    text = tmp_path / "text.txt"
    text.write_text("once upon a time " * 30)
    ask = ["perplexity", model, text, "--window", 64, "--threads", 1]
    assert llamaherd(*ask, "--stages", 2).stdout == llamaherd(*ask).stdout


@pytest.mark.parametrize("stages", [0, 6, -1])
def test_as_many_stages_as_layers_at_most(llamaherd: Run, model: Path, stages: int) -> None:
    done = llamaherd("run", model, "once", "--stages", stages)
    assert done.returncode == 2
    assert "from 1 to 5" in done.stderr


def test_adapters_are_not_cut(llamaherd: Run, model: Path) -> None:
    done = llamaherd("run", model, "once", "--stages", 2, "--lora", "x.gguf")
    assert done.returncode == 2
    assert "adapters" in done.stderr
