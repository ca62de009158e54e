"""The self-test's part on attention.

ggml's own graph code computes each case twice, by stock llama.cpp and by the plug-in. They must agree
closely where stock sums in 32 bits and does not round the queries (whole numbers survive its rounding), and
as well as rounding allows elsewhere. And a token must be bitwise the same alone, in any part of the batch, on
any number of threads, with its cells moved to other places of the cache, and whatever the cells that its mask
closes hold, even NaN.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from . import ggml as graphs
from .library import CACHE_TYPES, load

__all__ = ["test_attention"]


@dataclasses.dataclass(frozen=True)
class _Case:
    keys: str
    values: str
    columns: tuple[int, int]
    heads: tuple[int, int] = (6, 2)
    tokens: int = 70
    cells: int = 300
    streams: int = 1
    mask: str = "causal"
    max_bias: float = 0.0
    cap: float = 0.0
    sinks: bool = False
    tolerance: float = 2e-5

    def __str__(self) -> str:
        more = [name for name in ("max_bias", "cap", "sinks") if getattr(self, name)]
        kind = f"{self.keys} and {self.values}, {self.columns[0]} columns"
        return ", ".join([f"{self.tokens} tokens", kind, f"mask: {self.mask}", *more])


_CASES = (
    _Case("F16", "F16", (64, 64)),
    _Case("F16", "F16", (64, 64), heads=(9, 3), mask="sequences", cells=600),
    _Case("F16", "F16", (80, 80), mask="window", heads=(3, 3)),
    _Case("F16", "F16", (96, 96), mask="none"),
    _Case("F16", "F16", (128, 128), max_bias=8.0),
    _Case("F16", "F16", (256, 256), cap=30.0, heads=(4, 1)),
    _Case("F16", "F16", (72, 40), sinks=True, streams=2),
    _Case("F32", "F32", (64, 64), mask="window"),
    _Case("BF16", "BF16", (64, 64)),
    _Case("Q8_0", "Q8_0", (64, 64)),
    _Case("Q8_0", "Q8_0", (128, 128), mask="window", max_bias=4.0, sinks=True),
    # stock sums these in 16 bits
    _Case("Q8_0", "F16", (64, 64), mask="sequences", tolerance=5e-2),
    _Case("F16", "F16", (64, 64), tokens=5, tolerance=5e-2),
)


def test_attention(ggml: Any) -> str:
    """What is wrong, or ""."""
    for case in _CASES:
        problem = _test(ggml, case)
        if problem:
            return f"{problem} ({case})"
    return ""


def _test(ggml: Any, case: _Case) -> str:
    import numpy as np

    q, k, v, mask, sinks = _data(case)
    stock = _attend(ggml, case, q, k, v, mask, sinks, ours=False)
    ours = _attend(ggml, case, q, k, v, mask, sinks)
    if ours is None:
        return "llama.cpp does not give us attention"
    size = float(np.sqrt(np.mean(np.square(stock))))
    if not np.isfinite(ours).all() or float(np.abs(ours - stock).max()) > case.tolerance * size:
        return "attention differs from stock's"
    parts = [(0, case.tokens, 1), (0, case.tokens, 3), (case.tokens - 1, 1, 3)]
    parts += [(3, 1, 1), (1, 2, 2), (case.tokens // 2, case.tokens // 3, 2), (0, 5, 1)]
    for first, count, threads in parts:
        here = slice(first, first + count)
        part = _attend(
            ggml, case, q[:, here], k, v, None if mask is None else mask[:, :, here], sinks, threads=threads
        )
        if not np.array_equal(part, ours[:, here]):
            return f"attention of {count} tokens on {threads} threads differs from that of {case.tokens}"
    if mask is None:
        return ""
    # a wider cache, the cells in the same order elsewhere, NaN between them
    random = np.random.default_rng(1)
    places = np.sort(random.permutation(2 * case.cells)[: case.cells])
    wide = {}
    for name, values in (("k", k), ("v", v)):
        kind = case.keys if name == "k" else case.values
        wide[name] = np.full(
            (case.streams, 2 * case.cells, *values.shape[2:]), 0 if kind == "Q8_0" else np.nan, np.float32
        )
        wide[name][:, places] = values
    moved = np.full((*mask.shape[:3], 2 * case.cells), -np.inf, np.float16)
    moved[..., places] = mask
    if not np.array_equal(_attend(ggml, case, q, wide["k"], wide["v"], moved, sinks, threads=2), ours):
        return "attention differs where cells lie elsewhere"
    return ""


def _data(case: _Case) -> tuple[Any, ...]:
    """q, k, v, mask, sinks."""
    import numpy as np

    random = np.random.default_rng(case.tokens)
    q = random.integers(-127, 128, (case.streams, case.tokens, case.heads[0], case.columns[0])).astype(
        np.float32
    )
    q[..., ::32] = 127  # the largest of every block: its scale is 1 where stock rounds to eight bits
    k = random.standard_normal((case.streams, case.cells, case.heads[1], case.columns[0])).astype(np.float32)
    v = random.standard_normal((case.streams, case.cells, case.heads[1], case.columns[1])).astype(np.float32)
    sinks = random.standard_normal(case.heads[0]).astype(np.float32) * 3 if case.sinks else None
    if case.mask == "none":
        return q, k, v, None, sinks
    token, cell = np.arange(case.tokens)[:, None], np.arange(case.cells)[None]
    at = case.cells - case.tokens + token
    if case.mask == "sequences":  # a prompt for all, then every fifth cell
        open_cells = (cell < case.cells // 3) | ((cell <= at) & (cell % 5 == token % 5))
    else:
        open_cells = (cell <= at) & ((cell > at - 100) | (case.mask != "window"))
    distance = (
        -np.abs(at - cell).astype(np.float32) / 8 if case.max_bias else np.zeros_like(at - cell, np.float32)
    )
    mask = np.where(open_cells, distance, -np.inf).astype(np.float16)
    mask[2] = -np.inf  # a token that sees nothing
    return q, k, v, np.broadcast_to(mask, (case.streams, 1, *mask.shape)), sinks


def _attend(
    ggml: Any,
    case: _Case,
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    sinks: Any,
    *,
    ours: bool = True,
    threads: int = 1,
) -> Any:
    """The result; None if the plug-in was to compute it and did not."""
    from .enabling import counts

    before = load().llamaherd_kernels_take_attention(int(ours))
    attention = graphs.Attention(
        ggml,
        (CACHE_TYPES[case.keys], CACHE_TYPES[case.values]),
        (case.streams, q.shape[1], *case.heads, k.shape[1]),
        case.columns,
        mask=None if mask is None else mask.shape[:2],
        # whole numbers up to 127: scores of a few units
        scale=1 / 64 / case.columns[0] ** 0.5,
        max_bias=case.max_bias,
        cap=case.cap,
        sinks=case.sinks,
        threads=threads,
    )
    try:
        attention.set(q, k, v, mask, sinks)
        computed = counts()[2]
        attention.compute()
        if ours and counts()[2] == computed:
            return None
        return attention.result()
    finally:
        attention.close()
        load().llamaherd_kernels_take_attention(before)
