"""The parts in which llama.cpp computes a batch."""

from __future__ import annotations

import numpy as np
import pytest

from llamaherd.engine.context import Context
from llamaherd.engine.protocol import Batch
from llamaherd.engine.ubatches import ubatches


def parts(sequences: list[int], n_ubatch: int, unified: bool) -> list[list[int]]:
    return [p.tolist() for p in ubatches(np.array(sequences, np.int32), n_ubatch, unified=unified)]


def test_a_unified_cache_takes_tokens_as_they_come():
    assert parts([1, 0, 1, 2, 2], 2, True) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("sequences", "n_ubatch", "expected"),
    [
        ([0, 1, 2], 8, [[0, 1, 2]]),
        ([0, 0, 1, 1], 8, [[0, 1, 2, 3]]),
        ([0, 1, 0, 1], 8, [[0, 2, 1, 3]]),
        ([0, 0, 0, 1], 8, [[0, 3], [1, 2]]),
        ([3, 1, 0, 2], 8, [[0], [1, 3], [2]]),
        ([0, 2], 8, [[0], [1]]),
        ([0, 0, 0, 0, 1, 1, 1, 1], 4, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ([0, 1, 2], 2, [[0, 1], [2]]),
    ],
)
def test_a_split_cache_takes_the_same_number_of_each_sequence(sequences, n_ubatch, expected):
    assert parts(sequences, n_ubatch, False) == expected


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_one_by_one_they_give_what_the_batch_gives(tiny_model, seed, unified):
    """Bit for bit, in the order that llama.cpp itself says (which it does for the last hidden states)."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, 4)
    rows = [(s, p) for s, n in enumerate(lengths) for p in range(n)]
    keys = rng.integers(0, 60, len(rows))
    rows = [
        r
        for _, r in sorted(
            zip(keys.tolist(), rows, strict=True), key=lambda kr: (kr[1][1] * 7 + kr[0], kr[1])
        )
    ]
    rows.sort(key=lambda r: r[1])
    seq, pos = (np.array(c, np.int32) for c in zip(*rows, strict=True))
    batch = Batch(rng.integers(0, 200, len(rows)).astype(np.int32), pos, seq, np.ones(len(rows), np.bool_))
    settings = {
        "n_ctx": 1024, "n_batch": 128, "n_ubatch": 16, "n_seq_max": 4, "kv_unified": unified,
        "n_threads": 1, "n_threads_batch": 1,
    }  # fmt: skip
    last = tiny_model.n_layer - 1
    plain, tapped = Context(tiny_model, **settings), Context(tiny_model, layer_outputs=True, **settings)
    for context in (plain, tapped):
        for _ in range(4):
            context.memory.allocate()
    expected = plain.run(batch, hidden=True)
    found = tapped.run(batch, hidden=True, layers=[last])
    assert np.array_equal(expected.logits, found.logits)
    assert np.array_equal(expected.hidden, found.hidden)
    # rows that were confused would not fit the hidden states, which are their norm times a weight
    ratio = found.hidden / found.layers[last]
    assert np.allclose(ratio / ratio[:, :1], ratio[:1] / ratio[0, 0], rtol=1e-2)
    plain.close()
    tapped.close()
