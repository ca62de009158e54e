"""Products of llamaherd-kernels beside stock llama.cpp's, on this machine: for each weight type, shape and batch size.

    python benchmarks/kernels.py                              # all types, two shapes
    python benchmarks/kernels.py --types Q4_1 Q6_K --shapes 4096x4096 --rows 1 8 512
    python benchmarks/kernels.py --full --cold                # four shapes, seven batch sizes; weights in memory
    python benchmarks/kernels.py --attention                  # attention beside stock's
    python benchmarks/kernels.py --models                     # end to end: SmolLM2 in several types
    python benchmarks/kernels.py --models --full --folder DIR # and Gemma 3 270M, and a random llama of 1.5 B weights
    python benchmarks/kernels.py --models llama-1.5b NAME=FILE --types Q8_0 --ik PYTHON
    python benchmarks/kernels.py --quality                    # how near its logits are to those of exact activations

Any of them with --json FILE also appends each row to FILE, as a line of JSON with the machine's facts: products and attention in
seconds, models in tokens a second, NLL and KL in nats a token. kernel_charts.py draws them.

Stock is measured on its best path (its repacked layout where it has one). Both run on ggml's own threads, in turns;
medians. With --threads 1 the time is the CPU's, which other processes on the machine disturb less. GOPS: 2 x K x N x rows a second.
GB/s: bytes of the weights as the file holds them, read once a product (weights that fit the caches are not read from memory: more
than 100%, unless --cold). Their shares are of what this machine can do, measured anew before each type; the best so far counts.

Models: --folder keeps the files that are made (6 GB for the 1.5 B weights), --ik names the interpreter of another virtual environment with
ik-llama-cpp-python, whose engine is measured with and without run-time repacking. An engine that fails is left out, with its last words.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path

from kernel_models import compare_models
from model_files import FAMILIES
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


SHAPES, FULL_SHAPES = ["576x1536", "2048x2048"], ["576x1536", "1536x576", "4096x4096", "4096x14336"]
ROWS, FULL_ROWS = [1, 8, 512], [1, 2, 4, 8, 16, 64, 512]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", nargs="+", help="default: all; with --models: some")
    parser.add_argument("--shapes", nargs="+", help=f"KxN; default: {' '.join(SHAPES)}")
    parser.add_argument("--rows", nargs="+", type=int, help=f"default: {' '.join(map(str, ROWS))}")
    parser.add_argument(
        "--full", action="store_true", help="all models; of products, more shapes and rows by default"
    )
    parser.add_argument(
        "--cold", action="store_true", help="large weights are in memory, not in caches, up to 16 rows"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=0.25, help="for each measurement and path")
    parser.add_argument("--level", help="instruction set; default: the best that passes its self-test")
    parser.add_argument("--attention", action="store_true", help="attention instead of products")
    parser.add_argument("--cache", nargs="+", default=["F16", "Q8_0"], help="types of keys and values")
    parser.add_argument("--heads", nargs="+", default=["9/3x64", "32/8x128"], help="queries/keys x columns")
    parser.add_argument("--quality", action="store_true", help="likelihood and KL divergence of whole models")
    parser.add_argument("--tokens", type=int, default=20000, help="of text, with --quality")
    parser.add_argument("--only", default="", help="matrices to quantise (ffn_down), with --quality")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append each row, as a line of JSON")
    models = parser.add_argument_group("whole models")
    models.add_argument(
        "--models",
        nargs="*",
        metavar="MODEL",
        help=f"whole models instead of products: {', '.join(FAMILIES)} (default: the first), NAME=FILE",
    )
    models.add_argument("--rounds", type=int, default=3)
    models.add_argument("--folder", type=Path, help="where model files are made and kept; default: not kept")
    models.add_argument(
        "--stock-attention", action="store_true", help="our products with stock's attention too"
    )
    models.add_argument("--ik", metavar="PYTHON", help="an interpreter that has ik-llama-cpp-python")
    models.add_argument(
        "--other", metavar="FOLDER", help="another build of llama-cpp-python (pip install --target FOLDER)"
    )
    options = parser.parse_args()
    options.shapes = options.shapes or (FULL_SHAPES if options.full else SHAPES)
    options.rows = options.rows or (FULL_ROWS if options.full else ROWS)
    unknown = [name for name in options.models or [] if name not in FAMILIES and "=" not in name]
    if unknown:
        parser.error(f"--models {unknown[0]}: one of {', '.join(FAMILIES)}, or NAME=FILE")
    chosen = next((mode for mode in MODES if getattr(options, mode, None) not in (None, False)), "products")
    MODES[chosen](options, Rows(options.json, mode=chosen, threads=options.threads, level=options.level))


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
    peak = read = 0.0
    print(
        f"{'type':8}{'K x N':>14}{'rows':>6}{'stock':>10}{'ours':>10}{'ratio':>7}{'GOPS':>7}{'':>5}{'GB/s':>6}{'':>5}"
        "  stock's path"
    )
    for kind in types:
        # neighbours on a shared machine slow it down for seconds: the most that was ever seen is what it can do
        peak = max(peak, peak_gops(status.level, options.threads))
        read = max(read, read_gigabytes(options.threads))
        print(
            f"{peak:.0f} GOPS of byte products from registers, {read:.1f} GB/s read from memory", flush=True
        )
        for m in compare(
            (kind,),
            shapes,
            tuple(options.rows),
            threads=options.threads,
            seconds=options.seconds,
            cold=options.cold,
        ):
            print(
                f"{m.type:8}{f'{m.k}x{m.n}':>14}{m.rows:6}{m.stock * 1e6:8.0f}us{m.ours * 1e6:8.0f}us{m.ratio:7.2f}"
                f"{m.gops:7.0f}{m.gops / peak:5.0%}{m.gigabytes:6.1f}{m.gigabytes / read:5.0%}  {m.stock_path}",
                flush=True,
            )
            rows.add(
                **dataclasses.asdict(m),
                level=status.level,
                cold=options.cold,
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


MODES = {
    "models": compare_models,
    "attention": compare_attention,
    "quality": compare_quality,
    "products": compare_products,
}


if __name__ == "__main__":
    main()
