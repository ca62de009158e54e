"""A tiny model to be cut, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamaherd.engine.context import Context
from llamaherd.engine.model import Model
from llamaherd.engine.protocol import Batch, Engine, FloatArray
from llamaherd.files.synthesize import synthesize
from llamaherd.shard.in_process import InProcessChain
from llamaherd.shard.pipeline import Pipeline
from llamaherd.shard.slices import SliceStore
from llamaherd.shard.stage import Stage

LAYERS = 6
CUTS = (0, 1, 4, LAYERS)
SETTINGS = {
    "n_ctx": 1024,
    "n_batch": 64,
    "n_ubatch": 32,
    "n_seq_max": 8,
    "n_threads": 1,
    "n_threads_batch": 1,
}


@pytest.fixture(autouse=True)
def own_slices(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAHERD_SLICES", str(tmp_path_factory.getbasetemp() / "slices"))


@pytest.fixture(scope="session")
def six_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthesize(
        tmp_path_factory.mktemp("six") / "six.gguf", "llama", layers=LAYERS, type="q8_0", n_ctx=1024
    )


@pytest.fixture
def make_whole(six_layers: Path) -> Iterator[Callable[..., Context]]:
    models: list[Model] = []

    def make(**settings: Any) -> Context:
        models.append(Model.load(six_layers))
        return Context(models[-1], **SETTINGS | settings)

    yield make
    for model in models:
        model.close()


@pytest.fixture
def make_chain(six_layers: Path, tmp_path: Path) -> Iterator[Callable[..., Pipeline]]:
    pipelines: list[Pipeline] = []

    def make(cuts: tuple[int, ...] = CUTS, **settings: Any) -> Pipeline:
        store = SliceStore(tmp_path / "slices")
        stages = [Stage.load(six_layers, a, b, store=store, **SETTINGS | settings) for a, b in pairwise(cuts)]
        pipelines.append(Pipeline(InProcessChain(stages), Model.load(six_layers, vocab_only=True)))
        return pipelines[-1]

    yield make
    for pipeline in pipelines:
        pipeline.close()


def batch_of(engine: Engine, parts: dict[int, list[int]], *, interleaved: bool = False) -> Batch:
    """Tokens of several sequences, which continue them; all wanted."""
    rows = [
        (sequence, engine.memory.length(sequence) + i, token)
        for sequence, tokens in parts.items()
        for i, token in enumerate(tokens)
    ]
    if interleaved:
        rows.sort(key=lambda row: row[1])
    sequences, positions, tokens = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    return Batch(tokens, positions, sequences, np.ones(len(rows), np.bool_))


def conversation(engine: Engine) -> list[FloatArray]:
    """Prefill in several chunks, interleaved sequences, forks, trims and ends; all logits on the way."""
    rng = np.random.default_rng(1)
    n_vocab = engine.vocabulary.n_tokens
    found: list[FloatArray] = []

    def run(parts: dict[int, int], *, interleaved: bool = False) -> None:
        drawn = {s: rng.integers(0, n_vocab, n).tolist() for s, n in parts.items()}
        found.append(engine.decode(batch_of(engine, drawn, interleaved=interleaved)).copy())

    memory = engine.memory
    for expected in range(4):
        assert memory.allocate() == expected
    run({0: 150})
    run({1: 5, 2: 40, 3: 17}, interleaved=True)
    fork = memory.fork(0, 120)
    for _ in range(6):
        run({3: 1, fork: 1, 0: 1, 2: 1})
    memory.trim(2, 10)
    run({2: 3, 1: 1})
    memory.release(0)
    again = memory.fork(fork)
    run({again: 2, fork: 1, 3: 1})
    for sequence in (1, 2, 3, fork, again):
        memory.release(sequence)
    return found


def equal(a: list[FloatArray], b: list[FloatArray]) -> list[bool]:
    return [np.array_equal(x, y) for x, y in zip(a, b, strict=True)]
