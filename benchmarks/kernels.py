"""Products of llamaherd-kernels beside stock llama.cpp's, on this machine: for each weight type, shape and batch size.

    python benchmarks/kernels.py                              # all types, two shapes
    python benchmarks/kernels.py --types Q4_1 Q6_K --shapes 4096x4096 --rows 1 8 512
    python benchmarks/kernels.py --attention                  # attention beside stock's
    python benchmarks/kernels.py --models                     # end to end: SmolLM2 in several types
    python benchmarks/kernels.py --quality                    # how near its logits are to those of exact activations

Any of them with --json FILE also appends each row to FILE, as a line of JSON with the machine's facts: products and attention in
seconds, models in tokens a second, NLL and KL in nats a token.

Stock is measured on its best path (its repacked layout where it has one). Both run on ggml's own threads, in turns;
medians. With --threads 1 the time is the CPU's, which other processes on the machine disturb less. GOPS: 2 x K x N x rows a second. GB/s: bytes of the weights as the file holds them, read once a product
(weights that fit the caches are not read from memory: more than 100%). Their shares are of what this machine can do, measured first.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from quality import compare_quality
from rows import Rows

TYPES = [
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "IQ4_NL",
    "MXFP4",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "Q2_K",
    "Q3_K",
    "IQ4_XS",
    "F16",
    "BF16",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", nargs="+", help="default: all; with --models: some")
    parser.add_argument("--shapes", nargs="+", default=["576x1536", "2048x2048"], help="KxN")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 512])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=0.25, help="for each measurement and path")
    parser.add_argument("--level", help="instruction set; default: the best that passes its self-test")
    parser.add_argument("--rounds", type=int, default=3, help="of whole models")
    parser.add_argument("--models", action="store_true", help="whole models instead of products")
    parser.add_argument("--attention", action="store_true", help="attention instead of products")
    parser.add_argument("--quality", action="store_true", help="likelihood and KL divergence of whole models")
    parser.add_argument("--tokens", type=int, default=20000, help="of text, with --quality")
    parser.add_argument("--only", default="", help="matrices to quantise (ffn_down), with --quality")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append each row, as a line of JSON")
    parser.add_argument("--cache", nargs="+", default=["F16", "Q8_0"], help="types of keys and values")
    parser.add_argument("--heads", nargs="+", default=["9/3x64", "32/8x128"], help="queries/keys x columns")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        if os.environ["LLAMAHERD_KERNELS"] != "off":
            import llamaherd_kernels

            from llamaherd.native.amx import without_amx

            attention = os.environ["LLAMAHERD_BENCHMARK_ATTENTION"] == "on"
            with without_amx():  # llama.cpp makes its list of kernels here, before the model is loaded
                llamaherd_kernels.enable(level=options.level, attention=attention)
        print(json.dumps(measure_model(Path(options.one), options.threads)))
    else:
        mode, compare = next(
            (mode, compare) for mode, compare in MODES.items() if getattr(options, mode, mode == "products")
        )
        compare(options, Rows(options.json, mode=mode, threads=options.threads, level=options.level))


def compare_products(options: argparse.Namespace, rows: Rows) -> None:
    import llamaherd_kernels
    from llamaherd_kernels.measure import compare_products as compare
    from llamaherd_kernels.measure import peak_gops, read_gigabytes

    types = tuple(options.types or TYPES)
    status = llamaherd_kernels.enable(types=types, level=options.level)
    print(f"{status.level or status.reason}, {options.threads} threads")
    if not status.active:
        sys.exit(1)
    shapes = tuple(tuple(map(int, shape.split("x"))) for shape in options.shapes)
    peak, read = peak_gops(status.level, options.threads), read_gigabytes(options.threads)
    print(f"peak: {peak:.0f} GOPS of byte products from registers, {read:.1f} GB/s read from memory")
    print(
        f"{'type':8}{'K x N':>14}{'rows':>6}{'stock':>10}{'ours':>10}{'ratio':>7}{'GOPS':>7}{'':>5}{'GB/s':>6}{'':>5}"
        "  stock's path"
    )
    for m in compare(types, shapes, tuple(options.rows), threads=options.threads, seconds=options.seconds):
        print(
            f"{m.type:8}{f'{m.k}x{m.n}':>14}{m.rows:6}{m.stock * 1e6:8.0f}us{m.ours * 1e6:8.0f}us{m.ratio:7.2f}"
            f"{m.gops:7.0f}{m.gops / peak:5.0%}{m.gigabytes:6.1f}{m.gigabytes / read:5.0%}  {m.stock_path}",
            flush=True,
        )
        rows.add(
            **dataclasses.asdict(m),
            level=status.level,
            ratio=m.ratio,
            gops=m.gops,
            gigabytes=m.gigabytes,
            peak_gops=peak,
            read_gigabytes=read,
        )


def compare_attention(options: argparse.Namespace, rows: Rows) -> None:
    import llamaherd_kernels
    from llamaherd_kernels.measure import compare_attention as compare

    status = llamaherd_kernels.enable(level=options.level)
    print(
        f"{status.level or status.reason}, {options.threads} threads; GFLOPS: of what tokens see, in 32 bits"
    )
    if not status.attention:
        sys.exit(f"the plug-in does not take attention here: {status.reason}")
    print(
        f"{'cache':7}{'heads':10}{'work':9}{'tokens':>7}{'depth':>7}{'stock':>11}{'ours':>11}{'ratio':>7}{'GFLOPS':>8}"
    )
    cases = (
        ("prefill", 512, 512),
        ("prefill", 512, 2048),
        ("prefill", 1, 2048),
        ("forks", 8, 2048),
        ("forks", 16, 2048),
        ("apart", 8, 512),
    )
    for heads in options.heads:
        counts, columns = heads.split("x")
        both = tuple(map(int, counts.split("/")))
        for cache in options.cache:
            for m in compare(
                cases,
                columns=int(columns),
                heads=both,
                cache=cache,
                threads=options.threads,
                seconds=options.seconds,
            ):
                print(
                    f"{cache:7}{heads:10}{m.kind:9}{m.tokens:7}{m.depth:7}{m.stock * 1e6:9.0f}us{m.ours * 1e6:9.0f}us"
                    f"{m.ratio:7.2f}{m.gflops:8.1f}",
                    flush=True,
                )
                rows.add(**dataclasses.asdict(m), level=status.level, ratio=m.ratio)


MODEL_TYPES = ["Q4_0", "Q4_1", "Q8_0", "Q4_K_M", "Q6_K", "BF16"]


def compare_models(options: argparse.Namespace, rows: Rows) -> None:
    """SmolLM2 in several types; each measurement in a process of its own, in turns.

    "products": with stock's attention.
    """
    from llamaherd.demo import demo_model
    from llamaherd.engine.quantize import quantize

    with tempfile.TemporaryDirectory() as folder:
        print(
            f"{'type':8}{'what':>22}{'stock':>9}{'products':>9}{'ours':>9}{'to stock':>10}{'to products':>13}"
            f"   tokens/s, {options.threads} threads"
        )
        for name in options.types or MODEL_TYPES:
            path = demo_model()
            if name != "Q4_1":
                path = Path(folder) / f"{name}.gguf"
                quantize(demo_model(), path, name.lower())
            found: dict[str, list[dict[str, float]]] = {"off": [], "products": [], "require": []}
            for _ in range(options.rounds):
                for mode in found:
                    command = [
                        sys.executable,
                        __file__,
                        "--one",
                        str(path),
                        "--threads",
                        str(options.threads),
                        *(["--level", options.level] if options.level else []),
                    ]
                    run = subprocess.run(
                        command,
                        env={
                            **os.environ,
                            "LLAMAHERD_KERNELS": "require" if mode == "products" else mode,
                            "LLAMAHERD_BENCHMARK_ATTENTION": "off" if mode == "products" else "on",
                        },
                        capture_output=True,
                        text=True,
                        check=True,
                    )
                    found[mode].append(json.loads(run.stdout.splitlines()[-1]))
            for what in found["off"][0]:
                stock, products, ours = (
                    statistics.median(run[what] for run in found[mode]) for mode in found
                )
                print(
                    f"{name:8}{what:>22}{stock:9.0f}{products:9.0f}{ours:9.0f}{ours / stock:10.2f}{ours / products:13.2f}",
                    flush=True,
                )
                rows.add(
                    type=name,
                    what=what,
                    stock=stock,
                    products=products,
                    ours=ours,
                    rounds={mode: [run[what] for run in runs] for mode, runs in found.items()},
                )
            if path != demo_model():
                path.unlink()


DEPTHS = (32, 2048)
TOGETHER = (1, 8, 16)
STEPS = 12


def measure_model(path: Path, threads: int) -> dict[str, float]:
    """Tokens a second: prefill of 512 and 2048; sequences that decode together after a prompt that they share."""
    from llamaherd import Context, Model
    from llamaherd.engine.protocol import Batch

    def batch(positions: list[int], sequences: list[int]) -> Batch:
        n = len(positions)
        outputs = np.zeros(n, bool)
        outputs[-1] = True
        if positions[0] == positions[-1]:
            outputs[:] = True
        tokens = np.random.default_rng(n).integers(10, 40000, n).astype(np.int32)
        return Batch(tokens, np.array(positions, np.int32), np.array(sequences, np.int32), outputs)

    clock = time.process_time if threads == 1 else time.perf_counter
    with (
        Model.load(path) as model,
        Context(
            model,
            n_ctx=4096,
            n_batch=512,
            n_seq_max=max(TOGETHER),
            n_threads=threads,
            n_threads_batch=threads,
            kv_unified=True,
        ) as context,
    ):

        def prefill(n: int) -> int:
            context.memory.clear()
            root = context.memory.allocate()
            for at in range(0, n, 512):
                context.decode(batch(list(range(at, min(at + 512, n))), [root] * min(512, n - at)))
            return root

        found: dict[str, list[float]] = {}
        for _ in range(2):
            for n in (512, 2048):
                start = clock()
                prefill(n)
                found.setdefault(f"prefill {n}", []).append(n / (clock() - start))
            for depth in DEPTHS:
                root = prefill(depth)
                for n in TOGETHER:
                    forks = [context.memory.fork(root) for _ in range(1, n)]
                    start = clock()
                    for step in range(STEPS):
                        context.decode(batch([depth + step] * n, [root, *forks]))
                    found.setdefault(f"decode {n}, depth {depth}", []).append(STEPS * n / (clock() - start))
                    for fork in forks:
                        context.memory.release(fork)
                    context.memory.trim(root, depth)
        return {what: max(values) for what, values in found.items()}


MODES = {
    "models": compare_models,
    "attention": compare_attention,
    "quality": compare_quality,
    "products": compare_products,
}


if __name__ == "__main__":
    main()
