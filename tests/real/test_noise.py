"""Requests that come and go beside steady ones: nothing changes for these, and nothing is left behind."""

import random
import subprocess
import sys
import time

import pytest

from llamaherd import GenerationRequest, Herd, Model, SamplingConfig

STEADY = [f"The {thing} is" for thing in ("sun", "theorem", "answer", "capital of France")]


def steady_requests(max_tokens):
    return [
        GenerationRequest(p, max_tokens=max_tokens, ignore_eos=True, sampling=SamplingConfig(seed=i))
        for i, p in enumerate(STEADY)
    ]


def run_steady(model, cycles, max_tokens, **settings):
    """Tokens of the steady requests, with ``cycles`` others submitted and cancelled beside them."""
    rng = random.Random(4)
    with Herd(model, max_sequences=12, kv_unified=False, n_ctx=24 * 256, **settings) as herd:
        handles = [herd.submit(r) for r in steady_requests(max_tokens)]
        done, open_noise = 0, []
        while done < cycles:
            prompt = "noise " * rng.randint(1, 40)
            open_noise.append(herd.submit(GenerationRequest(prompt, n=rng.randint(1, 3), max_tokens=40)))
            if len(open_noise) > 5 or rng.random() < 0.6:
                # at a random moment: queued, in prefill, in decode, or after its end
                time.sleep(rng.random() * 0.01)
                open_noise.pop(rng.randrange(len(open_noise))).cancel()
                done += 1
        for handle in open_noise:
            handle.cancel()
        tokens = [h.result(600).completions[0].tokens for h in handles]
        for handle in open_noise:
            handle.result(60)
        memory = herd.engine.memory
        assert herd.stats().running == herd.stats().waiting == 0
        herd._scheduler.drop_cache()
        assert memory.free_sequences == memory.n_sequences
        assert memory.used_cells == 0
        return tokens


def test_200_cancellations_beside_steady_requests(tiny_model_path):
    with Model.load(tiny_model_path) as model:
        settings = {"n_threads": 1, "n_threads_batch": 1}
        assert run_steady(model, 200, 200, **settings) == run_steady(model, 0, 200, **settings)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_200_cancellations_on_the_demo_model(demo_model_path):
    with Model.load(demo_model_path) as model:
        assert run_steady(model, 200, 150) == run_steady(model, 0, 150)


LEAK = """
import sys, os, random
from llamaherd import *
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
rng = random.Random(0)
with Model.load(sys.argv[1]) as model, Herd(model, n_ctx=2048, max_sequences=8, n_threads=1) as herd:
    sizes = []
    for i in range(2250):
        sampling = SamplingConfig(repeat_penalty=1.1) if i % 3 else SamplingConfig(grammar='root ::= [a-z]+')
        handle = herd.submit(GenerationRequest("request %d" % i, n=rng.randint(1, 4), max_tokens=3, sampling=sampling))
        if rng.random() < 0.3:
            handle.cancel()
        handle.result(60)
        if i >= 250 and i % 250 == 0:
            sizes.append(rss())
    print([round(s, 1) for s in sizes])
    assert sizes[-1] - sizes[0] < 8, sizes
    assert sizes[-1] - sizes[len(sizes) // 2] < 4, sizes
"""


def test_memory_is_flat_over_2000_requests(tiny_model_path):
    done = subprocess.run(
        [sys.executable, "-c", LEAK, str(tiny_model_path)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout
