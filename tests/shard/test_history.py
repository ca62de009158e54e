"""What is computed again after a loss."""

from __future__ import annotations

import numpy as np
import pytest

from llamaherd.engine.protocol import Batch
from llamaherd.errors import StageLostError
from llamaherd.shard.history import History
from llamaherd.shard.work import Operation

from .conftest import batch_of


def tokens(sequences: dict[int, tuple[int, int]]) -> Batch:
    """(first position, number) of tokens of each sequence; each token is 100 * sequence + position."""
    rows = [(s, p) for s, (start, n) in sequences.items() for p in range(start, start + n)]
    seq, pos = (np.array(c, np.int32) for c in zip(*rows, strict=True))
    return Batch(100 * seq + pos, pos, seq, np.ones(len(rows), np.bool_))


def replayed(history: History) -> tuple[dict[int, list[int]], list[Batch]]:
    """The tokens of each sequence after a replay, which may do only what a stage can; and its batches."""
    held: dict[int, list[int]] = {}
    batches = []
    for work in history.replay():
        for o in work.operations:
            if o.kind == "allocate":
                assert o.sequence not in held
                held[o.sequence] = []
            elif o.kind == "fork":
                assert o.sequence not in held
                assert o.length <= len(held[o.source])
                held[o.sequence] = held[o.source][: o.length]
            else:
                held[o.sequence] = held[o.sequence][: o.length]
        if work.batch is not None:
            assert not work.batch.outputs.any()
            batches.append(work.batch)
            rows = zip(work.batch.sequences, work.batch.positions, work.batch.tokens, strict=True)
            for s, p, t in rows:
                assert p == len(held[int(s)])
                held[int(s)].append(int(t))
    return held, batches


def test_pieces_forks_and_trims():
    history = History()
    history.apply([Operation("allocate", 0), Operation("allocate", 1)])
    history.append(tokens({0: (0, 50)}))
    history.append(tokens({0: (50, 7)}))
    history.append(tokens({1: (0, 3)}))
    history.apply([Operation("fork", 2, 0, 53), Operation("fork", 3, 0, 57)])
    history.append(tokens({0: (57, 1), 2: (53, 1), 3: (57, 1)}))
    history.append(tokens({0: (58, 1), 2: (54, 1), 3: (58, 1)}))
    history.apply([Operation("trim", 3, length=57), Operation("release", 1)])
    history.append(tokens({3: (57, 1)}))
    held, batches = replayed(history)
    assert held[0] == list(range(59))
    assert held[2] == [*range(53), 253, 254]
    assert held[3] == [*range(57), 357]
    assert 1 not in held
    # the prompt's chunks once and as they were, then token by token, those of several together
    assert [len(b) for b in batches[:2]] == [50, 7]
    assert all(len(set(b.sequences.tolist())) == len(b) for b in batches[2:])
    assert history.length(2) == 55


def test_a_token_that_was_computed_alone_is_so_again():
    history = History()
    history.apply([Operation("allocate", s) for s in range(3)])
    history.append(tokens({0: (0, 1), 1: (0, 1), 2: (0, 1)}))
    history.append(tokens({0: (1, 1)}))
    history.append(tokens({0: (2, 1), 1: (1, 1)}))
    _, batches = replayed(history)
    assert [len(b) for b in batches] == [3, 1, 2]


def test_empty_sequences_come_back_too():
    history = History()
    history.apply([Operation("allocate", 3), Operation("fork", 1, 3, 0)])
    held, batches = replayed(history)
    assert held == {1: [], 3: []}
    assert not batches


@pytest.mark.parametrize("seed", range(30))
def test_any_history(seed):
    rng = np.random.default_rng(seed)
    history, held = History(together=3), {}
    for _ in range(120):
        kind = rng.choice(["allocate", "fork", "trim", "release", "append", "append", "append"])
        free = [s for s in range(6) if s not in held]
        some = int(rng.choice(list(held))) if held else None
        if kind == "allocate" and free:
            history.apply([Operation("allocate", free[0])])
            held[free[0]] = []
        elif kind == "fork" and free and some is not None:
            n = int(rng.integers(0, len(held[some]) + 1))
            history.apply([Operation("fork", free[0], some, n)])
            held[free[0]] = held[some][:n]
        elif kind == "trim" and some is not None:
            n = int(rng.integers(0, len(held[some]) + 1))
            history.apply([Operation("trim", some, length=n)])
            held[some] = held[some][:n]
        elif kind == "release" and some is not None:
            history.apply([Operation("release", some)])
            del held[some]
        elif kind == "append" and held:
            chosen = rng.choice(list(held), rng.integers(1, len(held) + 1), replace=False).tolist()
            new = {int(s): rng.integers(0, 1000, rng.integers(1, 4)).tolist() for s in chosen}
            rows = [(s, len(held[s]) + i, t) for s, ts in new.items() for i, t in enumerate(ts)]
            seq, pos, tok = (np.array(c, np.int32) for c in zip(*rows, strict=True))
            history.append(Batch(tok, pos, seq, np.ones(len(rows), np.bool_)))
            for s, ts in new.items():
                held[s] = held[s] + ts
    assert replayed(history)[0] == held


def test_a_restored_chain_goes_on_as_if_nothing_had_been(make_chain, make_whole):
    whole = make_whole(kv_unified=False)
    chain = make_chain(kv_unified=False)
    for engine in (whole, chain):
        for _ in range(3):
            engine.memory.allocate()
        engine.decode(batch_of(engine, {0: list(range(100))}))
        engine.memory.fork(0, 90)
        for i in range(5):
            engine.decode(batch_of(engine, {0: [i], 3: [i + 9], 1: [i]}))
    chain._recover(StageLostError(0, "the test says so"))
    assert chain.recoveries == 1
    last = {0: [7], 3: [8], 1: [9]}
    assert np.array_equal(whole.decode(batch_of(whole, last)), chain.decode(batch_of(chain, last)))
