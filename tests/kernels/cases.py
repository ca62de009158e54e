"""Cases for kernels_check (kernels/src/check.cpp): weights, activations and their products in float64.

    python -m tests.kernels.cases FILE

Written on this machine, read on another or under an emulator, where neither ggml nor numpy need be. Every type; blocks,
columns and rows that do not fit the tiles; activations of all kinds, random bytes as weights among them.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
from tests.kernels.test_products import BLOCK, PLAIN, activations, quantised, random_weights, rounded

SHAPES = ((1, 19, 33), (3, 83, 33), (5, 37, 13), (2, 16, 3))
"""Blocks of the weights' rows, rows of the weights, rows of activations."""

KINDS = ("normal", "largest", "all one", "zero", "spikes", "tiny")


def write(path: Path, types: list[str] | None = None) -> int:
    """All cases of these types (default: of every type), one after the other; how many."""
    from llamaherd_kernels import ggml as graphs
    from llamaherd_kernels.library import TYPES

    ggml = graphs.bind()
    count = 0
    with path.open("wb") as file:

        def add(name, n, data, exact, x, relative, largest):
            seen = rounded(name, x)
            expected, scale = seen @ exact.T, np.abs(seen) @ np.abs(exact).T
            bound = relative * (np.full_like(scale, scale.max()) if largest else scale) + 1e-38
            file.write(struct.pack("<5i", TYPES[name], x.shape[1], n, len(x), len(data)))
            file.write(data + x.astype("<f4").tobytes() + expected.tobytes() + bound.tobytes())

        for name in types or TYPES:
            for number, (blocks, n, m) in enumerate(SHAPES):
                k = blocks * BLOCK[name]
                weights = np.random.default_rng(k).standard_normal((n, k))
                for kind in KINDS if number == 1 else KINDS[:2]:
                    data, exact = quantised(ggml, name, np.sign(weights) if kind == "largest" else weights)
                    add(name, n, data, exact, activations(kind, m, k), 2e-5, largest=False)
                    count += 1
            if name not in PLAIN:
                rows, exact = random_weights(ggml, name, 25, BLOCK[name])
                add(
                    name, 25, rows.tobytes(), exact, activations("normal", 5, BLOCK[name]), 1e-3, largest=True
                )
                count += 1
    return count


if __name__ == "__main__":
    print(write(Path(sys.argv[1])), "cases")
