"""``python -m llamaherd_kernels.selftest LEVEL TYPE... [attention]``: does the plug-in compute right?

Run in a process of its own, because what is wrong may kill it. Prints JSON: the types that passed.
Each type's products are computed by ggml's own graph code, with the weights in its stock buffer and
in ours, also for experts. They must agree with stock: closely where the activations are whole
numbers, which eight bits hold exactly, and as well as rounding allows for others. And a row must be
bitwise the same alone, among any number of others (every shape of a tile), anywhere in the batch,
on any number of threads, and as an expert's. attention_test.py says what is asked of attention.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from . import ggml as graphs
from .attention_test import test_attention
from .library import TYPES, load

__all__ = ["main"]

_K, _N, _ROWS, _EXPERTS = 768, 72, 37, 3
_TOLERANCE = {"rounded": 0.02, "whole": 1e-4, "largest": 1e-4}
"""Largest error against stock by kind of activations, relative to the root mean square of the products."""


def main(arguments: list[str]) -> int:
    """Test a level; the exit status is 0 if the test could be run."""
    level, names = arguments[0], arguments[1:]
    ggml = graphs.bind()
    types = sum(1 << TYPES[name] for name in names if name in TYPES)
    problem = (
        load()
        .llamaherd_kernels_install(ggml._handle, level.encode(), types, int("attention" in names))
        .decode()
    )
    if problem:
        print(json.dumps({"problem": problem}))
        return 0
    passed, failed = [], {}
    for name in names:
        problem = test_attention(ggml) if name == "attention" else _test(ggml, TYPES[name])
        if problem:
            failed[name] = problem
        else:
            passed.append(name)
    print(json.dumps({"passed": passed, "failed": failed}))
    return 0


def _test(ggml: Any, kind: int) -> str:
    import numpy as np

    random = np.random.default_rng(kind)
    normal = random.standard_normal((_N * _EXPERTS, _K)).astype(np.float32)
    for what, x in _activations(random).items():
        # weights at both ends of their scale meet activations at both ends of theirs
        weights = graphs.quantise(ggml, kind, np.sign(normal) if what == "largest" else normal)
        problem = _test_activations(ggml, kind, weights, x, _TOLERANCE[what])
        if problem:
            return f"{problem} ({what} activations)"
    return ""


def _activations(random: Any) -> dict[str, Any]:
    """float32 [_ROWS, _K] each."""
    import numpy as np

    whole = random.integers(-127, 128, (_ROWS, _K)).astype(np.float32)
    whole[:, ::32] = 127  # the largest of every block: its scale is 1
    return {
        "rounded": random.standard_normal((_ROWS, _K)).astype(np.float32),
        "whole": whole,
        "largest": np.where(random.random((_ROWS, _K)) < 0.5, -127, 127).astype(np.float32),
    }


def _test_activations(ggml: Any, kind: int, weights: bytes, x: Any, tolerance: float) -> str:
    import numpy as np

    size = len(weights) // _EXPERTS
    matrices = [weights[i * size : (i + 1) * size] for i in range(_EXPERTS)]
    ours = [_product(ggml, kind, (_K, _N), matrix, x, "LLAMAHERD", threads=2) for matrix in matrices]
    if ours[0] is None:
        return "llama.cpp does not give us this type"
    if not _close(ours[0], _product(ggml, kind, (_K, _N), matrices[0], x, "CPU"), tolerance):
        return "products differ from stock's"
    for first, rows, threads in _parts():
        part = _product(ggml, kind, (_K, _N), matrices[0], x[first : first + rows], "LLAMAHERD", threads)
        if not np.array_equal(part, ours[0][first : first + rows]):
            return f"products of {rows} rows on {threads} threads differ from those of {_ROWS} rows"
    shape = (_K, _N, _EXPERTS)
    random = np.random.default_rng(0)
    for rows, threads in ((_ROWS, 1), (_ROWS, 2), (5, 1), (1, 3)):
        ids = np.stack([random.permutation(_EXPERTS)[:2] for _ in range(rows)]).astype(np.int32)
        mixed = _product(ggml, kind, shape, weights, x[:rows], "LLAMAHERD", threads, ids)
        if mixed is None:
            return "llama.cpp does not give us experts of this type"
        if not _close(mixed, _product(ggml, kind, shape, weights, x[:rows], "CPU", 1, ids), tolerance):
            return "products of experts differ from stock's"
        alike = np.stack([np.stack([ours[i][row] for i in ids[row]]) for row in range(rows)])
        if not np.array_equal(mixed, alike):
            return f"products of experts for {rows} rows on {threads} threads differ from those of a matrix"
    return ""


def _parts() -> list[tuple[int, int, int]]:
    """First row, rows, threads: every remainder of a tile (six rows at most), and chunks taken in turns."""
    few = [(rows, rows, 1 + rows % 3) for rows in range(1, 14)]
    return [(0, 1, 1), (_ROWS - 1, 1, 2), *few, (0, 33, 3), (4, 33, 1), (0, _ROWS, 1), (0, _ROWS, 3)]


def _product(
    ggml: Any,
    kind: int,
    shape: tuple[int, ...],
    weights: bytes,
    x: Any,
    buffer: str,
    threads: int = 1,
    ids: Any = None,
) -> Any:
    product = graphs.Product(ggml, kind, shape, len(x), buffer, threads, 0 if ids is None else ids.shape[1])
    try:
        if not product.supported:
            return None
        product.set_weights(weights)
        product.set_activations(x, ids)
        product.compute()
        return product.result()
    finally:
        product.close()


def _close(ours: Any, stock: Any, tolerance: float) -> bool:
    import numpy as np

    scale = float(np.sqrt(np.mean(np.square(stock))))
    return bool(np.isfinite(ours).all()) and float(np.abs(ours - stock).max()) < tolerance * scale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
