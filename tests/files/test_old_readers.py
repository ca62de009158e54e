"""The readers of 2023, built from PyPI in virtual environments of their own, against our files.

Slow; needs the network and a C++ compiler the first time. What is built stays in the user's cache folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.files.stock_llama import StockLlama

from llamaherd import files
from llamaherd.files.synthesize import synthesize

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPT = [1, 300, 280, 310, 261, 275, 399, 290]
N_PREDICT = 24
SCRIPT = Path(__file__).with_name("old_reader.py")

# what each version read, and the epsilon of its norms
READERS = {
    "0.1.48": (("ggml", "ggmf", "ggjt1"), 1e-6),
    "0.1.57": (("ggjt3",), 1e-6),
    "0.1.78": (("ggjt3",), 5e-6),
}


def interpreter(version: str) -> Path:
    """A Python that has llama-cpp-python of ``version``, built if it is not there yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "llamaherd-tests" / f"llama-cpp-python-{version}"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "-q"]
        subprocess.run([*pip, "setuptools<66", "wheel", "scikit-build", "cmake<3.28", "ninja"], check=True)
        subprocess.run([*pip, "--no-build-isolation", f"llama-cpp-python=={version}"], check=True)
        (folder / "ready").touch()
    return python


def read_then(version: str, path: Path, n_gqa: int = 1) -> dict[str, Any]:
    arguments = [str(N_PREDICT), *map(str, PROMPT)]
    done = subprocess.run(
        [interpreter(version), SCRIPT, path, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "N_GQA": str(n_gqa)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def big_enough(path: Path, type: str, **options: Any) -> Path:
    """These readers size their buffers by the number of layers, and know 32 as the least."""
    options = {"n_kv_heads": 4, "n_ff": 768, **options}
    return synthesize(path, "llama", layers=32, n_embd=256, n_heads=4, tokenizer="spm", type=type, **options)


def assert_agree(then: dict[str, Any], now: dict[str, Any], cosine: float) -> None:
    a, b = np.array(then["logits"]), np.array(now["logits"][len(PROMPT) - 1])
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > cosine


def assert_same_greedy(then: dict[str, Any], stock_llama: StockLlama, path: Path) -> None:
    """Every token the old reader chose is the one today's would choose after the same text.

    The kernels of 2023 looked exp and silu up in tables of f16, so logits differ by some 0.003; where two
    tokens are closer than that, either may come first.
    """
    now = stock_llama.ask(path=str(path), prompt=PROMPT + then["greedy"])
    logits = np.array(now["logits"])[len(PROMPT) - 1 : -1]
    chosen = logits[np.arange(len(logits)), then["greedy"]]
    noise = 0.01 * np.abs(logits).max(axis=1)
    assert (logits.max(axis=1) - chosen <= noise).all()
    assert (logits.argmax(axis=1) == then["greedy"]).mean() >= 0.9
    assert_agree(then, now, 0.9999)


@pytest.mark.parametrize("version", READERS)
@pytest.mark.parametrize("type", ["f16", "f32"])
def test_old_readers_say_the_same(tmp_path: Path, stock_llama: StockLlama, version: str, type: str) -> None:
    source = big_enough(tmp_path / "a.gguf", type)
    containers, epsilon = READERS[version]
    for to in containers:
        for n_parts in (1, 2) if to in ("ggml", "ggmf") else (1,):
            old = tmp_path / f"{n_parts}.{to}"
            with files.open(source) as model:
                files.convert(model, old, to=to, n_parts=n_parts, sync=False)
            with files.open(old) as model:
                assume = files.Assumptions(rms_epsilon=epsilon)
                files.convert(model, tmp_path / "b.gguf", assume=assume, sync=False)
            assert_same_greedy(read_then(version, old), stock_llama, tmp_path / "b.gguf")


@pytest.mark.parametrize("type", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
@pytest.mark.parametrize("version", READERS)
def test_old_readers_read_our_quantised_blocks(
    tmp_path: Path, stock_llama: StockLlama, version: str, type: str
) -> None:
    """Their kernels round activations in other ways, so logits agree less than on floats."""
    source = big_enough(tmp_path / "a.gguf", type)
    for to in READERS[version][0]:
        with files.open(source) as model:
            files.convert(model, tmp_path / to, to=to, sync=False)
        with files.open(tmp_path / to) as model:
            assume = files.Assumptions(rms_epsilon=READERS[version][1])
            files.convert(model, tmp_path / "b.gguf", assume=assume, sync=False)
        now = stock_llama.ask(path=str(tmp_path / "b.gguf"), prompt=PROMPT)
        assert_agree(read_then(version, tmp_path / to), now, 0.99)


def test_grouped_query_attention_in_ggjt_3(tmp_path: Path, stock_llama: StockLlama) -> None:
    """The file does not say n_head_kv; 0.1.78 can be told."""
    source = big_enough(tmp_path / "a.gguf", "f16", n_kv_heads=2)
    with files.open(source) as model:
        done = files.convert(model, tmp_path / "b.bin", to="ggjt", sync=False)
    assert any("n_gqa" in note for note in done.notes)
    with files.open(tmp_path / "b.bin") as model:
        files.convert(model, tmp_path / "b.gguf", sync=False)
    assert_same_greedy(read_then("0.1.78", tmp_path / "b.bin", n_gqa=2), stock_llama, tmp_path / "b.gguf")


QUANTISE = """
import sys
import llama_cpp as lc
source, target, ftype = sys.argv[1].encode(), sys.argv[2].encode(), int(sys.argv[3])
if hasattr(lc, "llama_model_quantize_default_params"):
    params = lc.llama_model_quantize_default_params()
    params.ftype, params.nthread = ftype, 1
    code = lc.llama_model_quantize(source, target, params)
else:
    code = lc.llama_model_quantize(source, target, ftype, 1)
sys.exit(code)
"""

# what each version's quantiser made: container to start from, {type: (ftype, tolerated relative error)}
QUANTISERS = {
    "0.1.48": (
        "ggjt1",
        {
            "q4_0": (2, 0.1),
            "q4_1": (3, 0.1),
            "q4_2": (5, 0.1),
            "q8_0": (7, 0.01),
            "q5_0": (8, 0.05),
            "q5_1": (9, 0.05),
        },
    ),
    "0.1.78": (
        "ggjt3",
        {
            "q4_0": (2, 0.1),
            "q8_0": (7, 0.01),
            "q2_k": (10, 0.4),
            "q3_k": (11, 0.2),
            "q4_k": (14, 0.1),
            "q5_k": (16, 0.05),
            "q6_k": (18, 0.03),
        },
    ),
}


@pytest.mark.parametrize(("version", "type"), [(v, t) for v, (_, types) in QUANTISERS.items() for t in types])
def test_we_read_what_old_quantisers_wrote(tmp_path: Path, version: str, type: str) -> None:
    """Blocks of an era made by that era's own code, decoded by us, against the weights they were made of."""
    container, types = QUANTISERS[version]
    ftype, tolerance = types[type]
    source = big_enough(tmp_path / "a.gguf", "f32")
    with files.open(source) as model:
        files.convert(model, tmp_path / "f32.bin", to=container, sync=False)
    command = [interpreter(version), "-c", QUANTISE, tmp_path / "f32.bin", tmp_path / "q.bin", str(ftype)]
    subprocess.run(command, check=True, capture_output=True)
    assert files.check(tmp_path / "q.bin") == []
    with files.open(tmp_path / "f32.bin") as before, files.open(tmp_path / "q.bin") as after:
        contents = files.contents_of(after)
        for name in ("layers.0.attention.wq.weight", "layers.31.feed_forward.w1.weight"):
            exact, read = before.tensors[name].dequantize(), after.tensors[name].dequantize()
            assert after.tensors[name].type.name == type
            assert np.sqrt(((exact - read) ** 2).mean() / (exact**2).mean()) < tolerance
            modern = contents.tensors[files.names.gguf_name(name, "llama") or ""].dequantize()
            assert np.abs(modern - read).max() < 1e-3 * np.abs(read).max()
