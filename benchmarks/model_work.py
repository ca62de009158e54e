"""What whole models do in kernel_models.py, the same for every engine: each runs it in a process of its own.

Nothing but numpy is imported, for other engines have interpreters of their own.
A depth of 32 stands for none: a prompt is at least a few tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

N_CTX, N_BATCH, N_SEQ_MAX = 4096, 512, 16
PROMPTS = (512, 2048)
STEPS = {1: 32, 8: 16, 16: 16}
"""Sequences that decode together, and for how many tokens each."""
TASKS = ("prefill", "decode 2048", "decode 32")

Ints = NDArray[np.int32]


class Engine(Protocol):
    """A model with a unified cache of N_CTX cells in F16, flash attention, and batches of at most N_BATCH tokens.

    Sequences are numbered from 0.
    """

    n_vocab: int

    def start(self) -> None:
        """Forget all; there is an empty sequence 0 now."""

    def compute(self, tokens: Ints, positions: Ints, sequences: Ints, every: bool) -> None:
        """Wait for the logits of ``every`` token or of the last one."""

    def fork(self, n: int) -> None:
        """Sequences 1 to n - 1 have the cells of sequence 0."""

    def rewind(self, n: int, depth: int) -> None:
        """Sequence 0 ends at ``depth``, the n - 1 others are gone."""


def serve(engine: Engine, threads: int) -> None:
    """Do the tasks that come as lines, and answer each with a line: tokens a second of each measurement, in JSON."""
    # who else writes to the standard output writes to standard error from now on
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    clock = time.process_time if threads == 1 else time.perf_counter
    prefill(engine, 32)  # what is done once, such as making buffers, is done now
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        task, _, depth = line.strip().partition(" ")
        if task == "prefill":
            found = measure_prefill(engine, clock)
        else:
            found = measure_decoding(engine, int(depth), clock)
        print(json.dumps(found), file=answers, flush=True)


def measure_prefill(engine: Engine, clock: Callable[[], float]) -> dict[str, float]:
    """Of the longest prompt; the shorter ones are its beginnings."""
    found = {}
    engine.start()
    start, done = clock(), 0
    for n in PROMPTS:
        extend(engine, done, n)
        found[f"prefill {n}"] = n / (clock() - start)
        done = n
    return found


def measure_decoding(engine: Engine, depth: int, clock: Callable[[], float]) -> dict[str, float]:
    """Of sequences that share a prompt of ``depth`` tokens."""
    found = {}
    prefill(engine, depth)
    for n, steps in STEPS.items():
        engine.fork(n)
        sequences = np.arange(n, dtype=np.int32)
        start = clock()
        for step in range(steps):
            engine.compute(tokens_of(engine, n), np.full(n, depth + step, np.int32), sequences, every=True)
        found[f"decode {n}, depth {depth}"] = steps * n / (clock() - start)
        engine.rewind(n, depth)
    return found


def prefill(engine: Engine, n: int) -> None:
    engine.start()
    extend(engine, 0, n)


def extend(engine: Engine, begin: int, end: int) -> None:
    for at in range(begin, end, N_BATCH):
        positions = np.arange(at, min(at + N_BATCH, end), dtype=np.int32)
        engine.compute(tokens_of(engine, len(positions)), positions, np.zeros_like(positions), every=False)


def tokens_of(engine: Engine, n: int) -> Ints:
    return np.random.default_rng(n).integers(10, min(40000, engine.n_vocab), n).astype(np.int32)
