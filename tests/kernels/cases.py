"""Cases for kernels_check (kernels/src/check.cpp): what goes in, and the results in float64.

    python -m tests.kernels.cases FILE

Written on this machine, read on another or under an emulator, where neither ggml nor numpy need be. Every type; blocks,
columns and rows that do not fit the tiles; activations of all kinds, random bytes as weights among them. And attention
(check_attention.h) under masks of all kinds.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
from tests.kernels.attention_reference import inputs, reference, stored
from tests.kernels.test_products import (
    BLOCK,
    PLAIN,
    activations,
    quantised,
    random_weights,
    rounded,
    rounded_to_bf16,
)

SHAPES = ((1, 19, 33), (3, 83, 33), (5, 37, 13), (2, 16, 3))
"""Blocks of the weights' rows, rows of the weights, rows of activations."""

KINDS = ("normal", "largest", "all one", "zero", "spikes", "tiny")

ATTENTION = (
    {"kind": "causal"},
    {"kind": "window", "types": ("Q8_0", "Q8_0"), "max_bias": 8.0, "heads": (9, 3)},
    {"kind": "random", "types": ("BF16", "F16"), "cap": 30.0, "columns": (80, 96)},
    {"kind": "none", "types": ("F32", "F32"), "sinks": np.arange(6, dtype=np.float32), "cells": 190},
    {"kind": "per head", "types": ("F16", "Q8_0"), "columns": (72, 64), "streams": 2, "tokens": 21},
    {"kind": "apart", "types": ("Q8_0", "F32")},
    {"kind": "prompt and own", "tokens": 8, "cells": 700, "cap": 2.0, "max_bias": 3.0},
    {"kind": "causal", "tokens": 1, "cells": 1100, "columns": (128, 128), "heads": (8, 2)},
)
"""Arguments of attention_reference.inputs."""


def write_attention(ggml, file) -> int:
    """All cases of attention; how many."""
    from llamaherd_kernels.library import CACHE_TYPES

    for case in ATTENTION:
        x = inputs(**case)
        k, v = (stored(ggml, values, kind)[0] for values, kind in ((x.k, x.types[0]), (x.v, x.types[1])))
        (streams, tokens, heads, columns), (cells, kv_heads) = x.q.shape, x.k.shape[1:3]
        masks = 0 if x.mask is None else x.mask.shape[1]
        types = (CACHE_TYPES[kind] for kind in x.types)
        shape = (streams, tokens, heads, kv_heads, cells, columns, x.v.shape[-1], *types)
        file.write(struct.pack("<12i", -1, *shape, masks, x.sinks is not None))
        file.write(struct.pack("<4f", x.scale, x.max_bias, x.cap, 1e-5))
        file.write(x.q.tobytes() + k + v)
        file.write(
            (b"" if x.mask is None else x.mask.tobytes()) + (b"" if x.sinks is None else x.sinks.tobytes())
        )
        file.write(reference(ggml, x).tobytes())
    return len(ATTENTION)


def write(path: Path, types: list[str] | None = None) -> int:
    """All cases of these types (default: of every type), one after the other, then attention's; how many."""
    from llamaherd_kernels import ggml as graphs
    from llamaherd_kernels.library import TYPES

    ggml = graphs.bind()
    count = 0
    with path.open("wb") as file:

        def add(name, n, data, exact, x, relative, largest):
            if name == "BF16":  # every level's, whether it rounds activations or not
                x = rounded_to_bf16(x)
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
        return count + write_attention(ggml, file)


if __name__ == "__main__":
    print(write(Path(sys.argv[1])), "cases")
