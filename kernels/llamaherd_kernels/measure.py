"""Products and attention of the plug-in beside stock llama.cpp's, on ggml's own threads, in turns."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from . import ggml as graphs
from .library import CACHE_TYPES, TYPES, load

__all__ = [
    "AttentionMeasured",
    "Measured",
    "compare_attention",
    "compare_products",
    "peak_gops",
    "read_gigabytes",
]

_WIDE = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")


@dataclasses.dataclass(frozen=True)
class Measured:
    """A product of ``rows`` activations with K x N weights, in seconds (medians).

    Attributes:
        stock_path: where stock keeps the weights: CPU_REPACK, or CPU for the file's own layout.
        weight_bytes: of the weights as a file holds them.
    """

    type: str
    k: int
    n: int
    rows: int
    stock: float
    ours: float
    stock_path: str
    weight_bytes: int

    @property
    def ratio(self) -> float:
        """How many times as fast as stock."""
        return self.stock / self.ours

    @property
    def gops(self) -> float:
        """Multiplications and additions, 10^9 a second."""
        return 2e-9 * self.k * self.n * self.rows / self.ours

    @property
    def gigabytes(self) -> float:
        """Weights read, 10^9 bytes a second."""
        return 1e-9 * self.weight_bytes / self.ours


def compare_products(
    types: tuple[str, ...],
    shapes: tuple[tuple[int, int], ...],
    rows: tuple[int, ...],
    *,
    threads: int,
    seconds: float = 0.25,
    cold: bool = False,
) -> Iterator[Measured]:
    """Measure each type at each shape (K, N) and number of rows, after enable() with these types.

    Stock is measured on its best path. With one thread the time is the CPU's, which other processes disturb
    less. K-types are left out where K is no multiple of 256.

    Args:
        types: of ``TYPES``.
        shapes: (K, N) each.
        rows: of activations.
        threads: of the CPU backend.
        seconds: for each measurement and path.
        cold: up to 16 rows meet weights of 8 MiB and more in memory, as in a model that no cache holds:
            calls go round copies of them that the caches cannot hold together. More rows take so long that
            memory does not matter.
    """
    import numpy as np

    ggml = graphs.bind()
    for name in types:
        for k, n in shapes:
            if k % (256 if name in _WIDE else 32):
                continue
            random = np.random.default_rng(0)
            weights = graphs.quantise(ggml, TYPES[name], random.standard_normal((n, k)).astype(np.float32))
            for count in rows:
                x = random.standard_normal((count, k)).astype(np.float32)
                apart = cold and count <= 16 and len(weights) >= 1 << 23
                copies = 1 + _cache_bytes() // len(weights) if apart else 1
                products: dict[str, list[graphs.Product]] = {}
                try:
                    for path in ("CPU_REPACK", "CPU", "LLAMAHERD"):
                        if path != "CPU" or "CPU_REPACK" not in products:
                            _add(products, ggml, path, TYPES[name], (k, n), count, threads, copies)
                    for product in itertools.chain(*products.values()):
                        product.set_weights(weights)
                        product.set_activations(x)
                    clock = time.process_time if threads == 1 else time.perf_counter
                    found = _interleaved({p: _in_turns(of) for p, of in products.items()}, seconds, clock)
                finally:
                    for product in itertools.chain(*products.values()):
                        product.close()
                ours = found.pop("LLAMAHERD")
                path, stock = next(iter(found.items()))
                yield Measured(name, k, n, count, stock, ours, path, len(weights))


@dataclasses.dataclass(frozen=True)
class AttentionMeasured:
    """Attention of one layer, in seconds (medians).

    Attributes:
        tokens: in the batch.
        depth: cells that the last token sees.
        kind: "prefill" (one text), "forks" (texts that share all but their last 16 cells) or "apart".
        gflops: products and additions of cells that tokens see, 10^9 a second, by the plug-in.
    """

    kind: str
    tokens: int
    depth: int
    columns: int
    heads: tuple[int, int]
    cache: str
    stock: float
    ours: float
    gflops: float

    @property
    def ratio(self) -> float:
        """How many times as fast as stock."""
        return self.stock / self.ours


def compare_attention(
    cases: tuple[tuple[str, int, int], ...],
    *,
    columns: int = 64,
    heads: tuple[int, int] = (9, 3),
    cache: str = "F16",
    threads: int,
    seconds: float = 0.5,
) -> Iterator[AttentionMeasured]:
    """Measure (kind, tokens, depth) in turns, after enable().

    Caches of 16 layers take turns too, as in a model: what one needs is not in the CPU's caches already. Not
    so for "prefill".

    Args:
        cases: kinds as in ``AttentionMeasured``.
        columns: of a head.
        heads: of queries, and of keys and values.
        cache: type of keys and values, of ``CACHE_TYPES``.
        threads: of the CPU backend.
        seconds: for each measurement.
    """
    import numpy as np

    ggml = graphs.bind()
    random = np.random.default_rng(0)
    for kind, tokens, depth in cases:
        cells = depth * tokens if kind == "apart" else depth + (16 * tokens if kind == "forks" else 0)
        cells = (cells + 255) // 256 * 256
        token, cell = np.arange(tokens)[:, None], np.arange(cells)[None]
        if kind == "prefill":
            seen = cell <= depth - tokens + token
        elif kind == "forks":
            seen = (cell < depth - 16) | ((cell % tokens == token) & (cell < depth - 16 + 16 * tokens))
        else:
            seen = cell // depth == token
        mask = np.where(seen, 0, -np.inf).astype(np.float16)[None, None]
        layers = []
        try:
            for _ in range(1 if kind == "prefill" else 16):
                number = CACHE_TYPES[cache]
                layer = graphs.Attention(
                    ggml,
                    (number, number),
                    (1, tokens, *heads, cells),
                    (columns, columns),
                    scale=columns**-0.5,
                    threads=threads,
                )
                layers.append(layer)
                q = random.standard_normal((1, tokens, heads[0], columns)).astype(np.float32)
                k, v = (random.standard_normal((1, cells, heads[1], columns), np.float32) for _ in range(2))
                layer.set(q, k, v, mask)

            def compute(ours: bool, layers: list[graphs.Attention] = layers) -> None:
                before = load().llamaherd_kernels_take_attention(int(ours))
                for layer in layers:
                    layer.compute()
                load().llamaherd_kernels_take_attention(before)

            clock = time.process_time if threads == 1 else time.perf_counter
            calls = {"stock": lambda: compute(False), "ours": lambda: compute(True)}
            found = _interleaved(calls, seconds, clock)
        finally:
            for layer in layers:
                layer.close()
        stock, ours = (found[path] / len(layers) for path in ("stock", "ours"))
        gflops = 4e-9 * columns * heads[0] * int(seen.sum()) / ours
        yield AttentionMeasured(kind, tokens, depth, columns, heads, cache, stock, ours, gflops)


def peak_gops(level: str, threads: int) -> float:
    """What a level's product of bytes reaches from registers, 10^9 multiplications and additions a second.

    On avx2 that is the product with 16-bit sums, which four-bit weights can use; wider ones need more
    instructions. The best of five runs.
    """
    rounds = 1 << 25
    library = load()
    done = library.llamaherd_kernels_peak(level.encode(), 1)
    return (
        1e-9
        * rounds
        * done
        * threads
        / _best(lambda _: library.llamaherd_kernels_peak(level.encode(), rounds), threads)
    )


def read_gigabytes(threads: int) -> float:
    """Memory read, 10^9 bytes a second: as much a thread as the last cache holds, at least 256 MiB.

    The best of five runs.
    """
    size = max(1 << 28, _cache_bytes())
    buffers = [ctypes.create_string_buffer(size) for _ in range(threads)]
    for buffer in buffers:
        ctypes.memset(buffer, 1, size)  # pages of its own, not the one page of zeros
    library = load()
    return 1e-9 * size * threads / _best(lambda i: library.llamaherd_kernels_read(buffers[i], size), threads)


def _best(call: Callable[[int], object], threads: int) -> float:
    """Seconds that all threads take together."""
    times = []
    for _ in range(5):
        running = [threading.Thread(target=call, args=(i,)) for i in range(threads)]
        start = time.perf_counter()
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        times.append(time.perf_counter() - start)
    return min(times)


def _cache_bytes() -> int:
    """Of the greatest cache that the system names, or 64 MiB."""
    sizes = [1 << 26]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.removesuffix("K").isdecimal():
            sizes.append(int(text.removesuffix("K")) << (10 if text.endswith("K") else 0))
    return max(sizes)


def _in_turns(products: list[graphs.Product]) -> Callable[[], None]:
    """A call computes the next of them."""
    turns = itertools.cycle(products)
    return lambda: next(turns).compute()


def _add(
    products: dict[str, list[graphs.Product]],
    ggml: Any,
    path: str,
    kind: int,
    shape: tuple[int, int],
    rows: int,
    threads: int,
    copies: int,
) -> None:
    for _ in range(copies):
        try:
            product = graphs.Product(ggml, kind, shape, rows, path, threads)
        except LookupError:
            return  # a build of llama.cpp without repacking
        if not product.supported:
            product.close()
            return
        products.setdefault(path, []).append(product)


def _interleaved(
    calls: Mapping[str, Callable[[], None]], seconds: float, clock: Callable[[], float], rounds: int = 5
) -> dict[str, float]:
    """Median time of a call of each, measured in turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    repeats = {}
    for name, call in calls.items():
        call()
        start = clock()
        call()
        repeats[name] = max(1, int(seconds / rounds / (clock() - start + 1e-7)))
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            for _ in range(repeats[name]):
                call()
            samples[name].append((clock() - start) / repeats[name])
    return {name: statistics.median(found) for name, found in samples.items()}
