from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.files.mutations import ggla

from llamaherd import files
from llamaherd.files.picture import picture
from llamaherd.files.summary import memory_needed, summarize
from llamaherd.files.synthesize import synthesize

# prints what libllama says it allocates for the KV cache of a context, in bytes
KV_SIZE = """
import re, sys
import llama_cpp as lc
log = []
callback = lc.llama_log_callback(lambda level, text, data: log.append(text.decode()))
lc.llama_log_set(callback, None)
lc.llama_backend_init()
for path in sys.argv[2:]:
    model = lc.llama_model_load_from_file(path.encode(), lc.llama_model_default_params())
    params = lc.llama_context_default_params()
    params.n_ctx = int(sys.argv[1])
    log.clear()
    context = lc.llama_init_from_model(model, params)
    sizes = re.findall(r"KV buffer size = +([0-9.]+) MiB", "".join(log))
    print([float(size) for size in sizes])
"""


def test_the_kv_cache_is_what_libllama_allocates(tmp_path: Path) -> None:
    names = ("llama", "qwen2", "gemma3", "gptneox", "falcon", "mixtral", "phi3")
    sizes = {"layers": 4, "n_embd": 512, "n_heads": 8}
    paths = [synthesize(tmp_path / f"{name}.gguf", name, **sizes) for name in names]
    done = subprocess.run(
        [sys.executable, "-c", KV_SIZE, "4000", *map(str, paths)], capture_output=True, text=True, check=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == len(names)
    for name, path, theirs in zip(names, paths, lines, strict=True):
        with files.open(path) as model:
            ours = memory_needed(files.contents_of(model), 4000)
        assert sum(theirs) == pytest.approx(ours.kv_cache / 2**20, abs=0.02), name
        assert ours.weights == sum(share.nbytes for share in summarize(files.open(path)).types)


def test_shares_add_up(tmp_path: Path) -> None:
    with files.open(synthesize(tmp_path / "x.gguf", type="q4_0")) as model:
        summary = summarize(model)
        assert sum(share.tensors for share in summary.types) == len(model.tensors)
        assert sum(share.weights for share in summary.types) == model.n_parameters
        bits = {share.type: share.bits for share in summary.types}
        assert (bits["q4_0"], bits["f32"]) == (4.5, 32.0)
        assert summary.types == sorted(summary.types, key=lambda share: -share.nbytes)


def test_what_cannot_run_is_summarised_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(ggla())
    with files.open(tmp_path / "a.bin") as adapter:
        summary = summarize(adapter)
    assert summary.container == "ggla-1"
    assert "adapter" in summary.notes[0]
    assert summary.memory is None


def test_pictures_of_parts_and_split_models(tmp_path: Path) -> None:
    source = synthesize(tmp_path / "x.gguf", "llama", tokenizer="spm", n_kv_heads=4, n_ff=192)
    with files.open(source) as model:
        files.convert(model, tmp_path / "parts.bin", to="ggml", n_parts=2, sync=False)
        first = files.convert(model, tmp_path / "split.gguf", split_size=60_000, sync=False).paths[0]
    for path in (tmp_path / "parts.bin", first):
        with files.open(path) as model:
            assert picture(model).count("<rect") > len(model.parts)
