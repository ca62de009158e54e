"""SmolLM2 over three stages: the whole model's logits, bit for bit, whatever happens to the stages."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from llamaherd import GenerationRequest, Herd, Model, SamplingConfig
from llamaherd.engine.context import Context
from llamaherd.engine.protocol import Batch, Engine, FloatArray
from llamaherd.shard.opening import open_stages

pytestmark = pytest.mark.real

SETTINGS = {"n_ctx": 4096, "n_seq_max": 8, "n_threads": 2, "n_threads_batch": 2}


def run(engine: Engine) -> list[FloatArray]:
    """A prefill, then 64 tokens of four interleaved sequences, two of them forks."""
    rng = np.random.default_rng(0)
    memory = engine.memory
    assert [memory.allocate() for _ in range(2)] == [0, 1]
    found = []
    for sequence, length in ((0, 200), (1, 37)):
        text = rng.integers(0, 49152, length).astype(np.int32)
        places = np.arange(length, dtype=np.int32)
        wanted = np.ones(length, np.bool_)
        found.append(engine.decode(Batch(text, places, np.full(length, sequence, np.int32), wanted)).copy())
    assert (memory.fork(0), memory.fork(0, 150)) == (2, 3)
    order = np.array([2, 0, 3, 1], np.int32)
    for _ in range(64):
        places = np.array([memory.length(int(s)) for s in order], np.int32)
        text = rng.integers(0, 49152, 4).astype(np.int32)
        found.append(engine.decode(Batch(text, places, order, np.ones(4, np.bool_))).copy())
    memory.clear()
    return found


@pytest.mark.parametrize("unified", [True, False])
def test_three_stages_are_the_whole(demo_model_path: Path, tmp_path: Path, unified: bool) -> None:
    with Model.load(demo_model_path) as model:
        whole = run(Context(model, **SETTINGS, kv_unified=unified))
    with open_stages(demo_model_path, 3, **SETTINGS, kv_unified=unified) as pipeline:
        cut = run(pipeline)
    assert all(np.array_equal(a, b) for a, b in zip(whole, cut, strict=True))


@pytest.mark.slow
def test_eight_streams_while_each_stage_is_killed(demo_model_path: Path) -> None:
    """Prints the seconds that each recovery took: pytest -m slow tests/real/test_shard.py -s"""
    requests = [
        GenerationRequest(
            f"Story number {i}: once upon a time there was",
            max_tokens=80,
            ignore_eos=True,
            sampling=SamplingConfig(temperature=0.8 * (i % 2), seed=i),
        )
        for i in range(8)
    ]
    pipeline = open_stages(demo_model_path, 3, **SETTINGS | {"n_seq_max": 24}, kv_unified=False)
    with Herd(pipeline, max_sequences=8, prefix_cache=False) as herd:
        expected = [h.result(200).completions[0] for h in [herd.submit(r) for r in requests]]
        for stage, how in ((0, "SIGKILL"), (1, "SIGKILL"), (2, "SIGKILL"), (1, "SIGSTOP")):
            handles = [herd.submit(r) for r in requests]
            begun = herd.stats().decoded_tokens
            while herd.stats().decoded_tokens < begun + 300:
                time.sleep(0.01)
            os.kill(pipeline.chain.status()[stage].pid, getattr(signal, how))
            found = [h.result(200).completions[0] for h in handles]
            assert [c.tokens for c in found] == [c.tokens for c in expected]
            assert [c.logprobs for c in found] == [c.logprobs for c in expected]
            print(f"{how} of stage {stage}: back after {pipeline.recovery_seconds:.2f} s")
        assert pipeline.recoveries == 4
