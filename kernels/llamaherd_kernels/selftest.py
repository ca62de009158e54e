"""``python -m llamaherd_kernels.selftest LEVEL TYPE...``: are the plug-in's products right on this machine?

Run in a process of its own, because what is wrong may kill it. Prints JSON: the types that passed.
Each type's products are computed by ggml's own graph code, with the weights in its stock buffer and in ours,
for one row, few and many, for experts, and with other numbers of threads; they must agree with stock as well
as quantised activations allow, and among each other bit by bit.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from . import ggml as graphs
from .library import TYPES, load

__all__ = ["main"]

_K, _N, _ROWS, _EXPERTS = 512, 72, 37, 3
_TOLERANCE = 0.06
"""Largest error against stock, relative to the root mean square of the products."""


def main(arguments: list[str]) -> int:
    """Test a level; the exit status is 0 if the test could be run."""
    level, names = arguments[0], arguments[1:]
    ggml = graphs.bind()
    types = sum(1 << TYPES[name] for name in names)
    problem = load().llamaherd_kernels_install(ggml._handle, level.encode(), types).decode()
    if problem:
        print(json.dumps({"problem": problem}))
        return 0
    passed, failed = [], {}
    for name in names:
        problem = _test(ggml, TYPES[name])
        if problem:
            failed[name] = problem
        else:
            passed.append(name)
    print(json.dumps({"passed": passed, "failed": failed}))
    return 0


def _test(ggml: Any, kind: int) -> str:
    import numpy as np

    random = np.random.default_rng(kind)
    weights = graphs.quantise(ggml, kind, random.standard_normal((_N * _EXPERTS, _K)).astype(np.float32))
    x = random.standard_normal((_ROWS, _K)).astype(np.float32)
    ids = np.stack([random.permutation(_EXPERTS)[:2] for _ in range(_ROWS)]).astype(np.int32)
    one = weights[: len(weights) // _EXPERTS]
    stock = _product(ggml, kind, (_K, _N), one, x, "CPU")
    ours = _product(ggml, kind, (_K, _N), one, x, "LLAMAHERD", threads=2)
    if ours is None:
        return "llama.cpp does not give us this type"
    if not _close(ours, stock):
        return "products differ from stock's"
    for rows, threads in ((1, 1), (1, 2), (5, 2), (_ROWS, 1), (_ROWS, 3)):
        if not np.array_equal(
            _product(ggml, kind, (_K, _N), one, x[:rows], "LLAMAHERD", threads), ours[:rows]
        ):
            return f"products of {rows} rows on {threads} threads differ from those of {_ROWS} rows"
    shape = (_K, _N, _EXPERTS)
    for threads in (1, 2):
        mixed = _product(ggml, kind, shape, weights, x, "LLAMAHERD", threads, ids)
        if mixed is None or not _close(mixed, _product(ggml, kind, shape, weights, x, "CPU", 1, ids)):
            return "products of experts differ from stock's"
    return ""


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


def _close(ours: Any, stock: Any) -> bool:
    import numpy as np

    scale = float(np.sqrt(np.mean(np.square(stock))))
    return bool(np.isfinite(ours).all()) and float(np.abs(ours - stock).max()) < _TOLERANCE * scale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
