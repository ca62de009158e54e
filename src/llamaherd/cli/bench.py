"""``llamaherd bench``: what is gained on this machine."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from ..errors import RequestError

__all__ = ["register"]

_TYPES = "Q4_0 Q4_1 Q8_0 Q4_K Q5_K Q6_K"


def register(app: typer.Typer) -> None:
    """Add this module's command to ``app``."""
    app.command("bench")(bench)


def bench(
    kernels: Annotated[bool, typer.Option("--kernels", help="Products of llamaherd-kernels.")] = False,
    types: Annotated[str, typer.Option(help="Weight types, separated by spaces.")] = _TYPES,
    shape: Annotated[str, typer.Option(help="Columns x rows of the weights.")] = "2048x2048",
    threads: Annotated[int | None, typer.Option(help="Threads; all CPUs if left out.")] = None,
    seconds: Annotated[float, typer.Option(help="For each measurement.")] = 0.2,
) -> None:
    """Measure products of llamaherd-kernels beside stock llama.cpp's, for 1, 8 and 128 rows."""
    if not kernels:
        raise RequestError("nothing to measure: llamaherd bench --kernels")
    from ..engine.cpus import available_cpus

    k, _, n = shape.partition("x")
    if not (k.isdecimal() and n.isdecimal() and int(k) and int(n)):
        raise RequestError(f"--shape {shape}: columns x rows, such as 2048x2048")
    try:
        plugin = importlib.import_module("llamaherd_kernels")
        measure = importlib.import_module("llamaherd_kernels.measure")
    except ImportError:
        raise RequestError("llamaherd-kernels is not installed: pip install 'llamaherd[fast]'") from None
    wanted = tuple(types.upper().split())
    status = plugin.enable(types=wanted)
    if not status.active:
        raise RequestError(f"llamaherd-kernels cannot be used here: {status.reason}")
    threads = threads or available_cpus()
    print(f"{status.level}, {threads} threads; x: times as fast as stock llama.cpp")
    print(f"{'type':8}{'rows':>6}{'stock':>11}{'ours':>11}{'x':>7}{'GOPS':>7}{'GB/s':>7}")
    for m in measure.compare_products(
        status.types, ((int(k), int(n)),), (1, 8, 128), threads=threads, seconds=seconds
    ):
        print(
            f"{m.type:8}{m.rows:6}{m.stock * 1e6:9.0f}us{m.ours * 1e6:9.0f}us"
            f"{m.ratio:7.2f}{m.gops:7.0f}{m.gigabytes:7.1f}",
            flush=True,
        )
