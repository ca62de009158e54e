"""A model cut into stages beside the same model whole: one process, a chain in one process, and processes.

    python benchmarks/shard.py [--model FILE] [--stages 3] [--rounds 5] [--tokens 40] [--svg OUT] [--json OUT]

All run in turns on the same machine, so each round sees the same machine. Decode throughput with 1, 4 and 8 sequences (n tokens
of each, greedy, after a prompt of 64 tokens), and prefill of 512 tokens. With one sequence the difference between processes and the chain in one
process is what the hops cost. llama.cpp alone is a bare loop over llama_decode on the whole model, through llama-cpp-python's
low-level API.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from llamaherd import files
from llamaherd.config import SamplingConfig, SchedulerConfig
from llamaherd.demo import demo_model
from llamaherd.engine.context import Context
from llamaherd.engine.model import Model
from llamaherd.engine.protocol import Batch, Draw, Engine, Pick, PipelinedEngine
from llamaherd.scheduler.loop import Scheduler
from llamaherd.shard.costs import costs_of_file
from llamaherd.shard.in_process import InProcessChain
from llamaherd.shard.opening import open_stages
from llamaherd.shard.pipeline import Pipeline
from llamaherd.shard.plan import even_cuts
from llamaherd.shard.stage import Stage
from llamaherd.types import GenerationRequest

PROMPT = 64


GREEDY = Draw(SamplingConfig(temperature=0), 0.0)


def decode_alone(engine: Engine, tokens: int) -> float:
    """Seconds a token of one sequence, each batch awaited: what a chain costs.

    The next token is drawn where the scheduler would have it drawn: on the last stage of a pipeline.
    """
    sequence = engine.memory.allocate()
    one, true = np.zeros(1, np.int32), np.ones(1, np.bool_)
    text = np.arange(PROMPT, dtype=np.int32) + 100
    outputs = np.zeros(PROMPT, np.bool_)
    outputs[-1] = True
    logits = engine.decode(
        Batch(text, np.arange(PROMPT, dtype=np.int32), one.repeat(PROMPT) + sequence, outputs)
    )
    token = int(logits[0].argmax())
    draws = isinstance(engine, PipelinedEngine) and engine.depth > 1
    began = time.perf_counter()
    for i in range(tokens):
        batch = Batch(one + token, one + PROMPT + i, one + sequence, true, draws=(GREEDY,) if draws else None)
        if isinstance(engine, PipelinedEngine) and draws:
            (pick,) = engine.collect(engine.submit(batch))
            assert isinstance(pick, Pick)
            token = pick.token
        else:
            token = int(engine.decode(batch)[0].argmax())
    seconds = time.perf_counter() - began
    engine.memory.release(sequence)
    return seconds / tokens


def bare_loop(path: Path, threads: int, tokens: int) -> Callable[[], float]:
    """llama.cpp alone: seconds a token."""
    import llama_cpp as L

    model = L.llama_model_load_from_file(str(path).encode(), L.llama_model_default_params())
    params = L.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 1024, threads, threads
    context = L.llama_init_from_model(model, params)
    n_vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))

    def run() -> float:
        L.llama_memory_clear(L.llama_get_memory(context), True)
        text = (L.llama_token * PROMPT)(*range(100, 100 + PROMPT))
        L.llama_decode(context, L.llama_batch_get_one(text, PROMPT))
        began = time.perf_counter()
        for _ in range(tokens):
            row = np.ctypeslib.as_array(L.llama_get_logits_ith(context, -1), (n_vocab,))
            one = (L.llama_token * 1)(int(row.argmax()))
            L.llama_decode(context, L.llama_batch_get_one(one, 1))
        return (time.perf_counter() - began) / tokens

    return run


def together(engine: Engine, sequences: int, tokens: int) -> float:
    """Tokens a second of so many sequences through the scheduler, prefill not counted."""
    scheduler = Scheduler(engine, SchedulerConfig(max_sequences=sequences, prefix_cache=False))
    text = tuple(range(100, 100 + PROMPT))
    handles = [
        scheduler.submit(
            GenerationRequest(
                (i, *text), max_tokens=tokens, ignore_eos=True, sampling=SamplingConfig(temperature=0)
            )
        )
        for i in range(300, 300 + sequences)
    ]
    while scheduler.stats().decoded_tokens == 0:
        scheduler.step()
    began, before = time.perf_counter(), scheduler.stats().decoded_tokens
    scheduler.run_until_idle()
    rate = (scheduler.stats().decoded_tokens - before) / (time.perf_counter() - began)
    assert all(h.done for h in handles)
    scheduler.drop_cache()
    return rate


def prefill(engine: Engine) -> float:
    """Tokens a second of a prompt of 512 in chunks of 128, as the scheduler sends them."""
    scheduler = Scheduler(engine, SchedulerConfig(prefix_cache=False, prefill_chunk=128))
    handle = scheduler.submit(GenerationRequest(tuple(range(500, 1012)), max_tokens=1, ignore_eos=True))
    began = time.perf_counter()
    scheduler.run_until_idle()
    seconds = time.perf_counter() - began
    assert handle.done
    scheduler.drop_cache()
    return 512 / seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = args.model or demo_model()
    settings = {
        "n_ctx": 4096, "n_seq_max": 8, "n_threads": args.threads, "n_threads_batch": args.threads,
    }  # fmt: skip
    with files.open(path) as model:
        cuts = even_cuts(costs_of_file(model), args.stages)
    whole = Context(Model.load(path), **settings)
    stages = [Stage.load(path, a, b, **settings) for a, b in pairwise(cuts)]
    chain = Pipeline(InProcessChain(stages), Model.load(path, vocab_only=True))
    processes = open_stages(path, args.stages, **settings)
    engines: dict[str, Engine] = {"whole": whole, "chain": chain, "processes": processes}
    llama_cpp = bare_loop(path, args.threads, args.tokens)
    found: dict[str, dict[str, list[float]]] = {"llama.cpp": {"token_ms": []}}
    for name in engines:
        found[name] = {key: [] for key in ("token_ms", "1", "4", "8", "prefill")}
    for round in range(args.rounds + 1):  # the first warms up
        for name, engine in engines.items():
            results: dict[str, float] = {"token_ms": 1000 * decode_alone(engine, args.tokens)}
            for n in (1, 4, 8):
                results[str(n)] = together(engine, n, args.tokens)
            results["prefill"] = prefill(engine)
            if round:
                for key, value in results.items():
                    found[name][key].append(value)
        alone = 1000 * llama_cpp()
        if round:
            found["llama.cpp"]["token_ms"].append(alone)
    medians: dict[str, dict[str, float]] = {
        name: {key: statistics.median(values) for key, values in rows.items()} for name, rows in found.items()
    }
    hops = [
        (p - c) / args.stages
        for p, c in zip(found["processes"]["token_ms"], found["chain"]["token_ms"], strict=True)
    ]
    print(f"{path.name}, stages {cuts}, {args.threads} threads each, medians of {args.rounds} rounds")
    print(f"{'':12}{'ms/token':>10}{'1 seq':>10}{'4 seq':>10}{'8 seq':>10}{'prefill':>10}   (tokens/s)")
    for name, row in medians.items():
        cells = [
            f"{row[key]:10.2f}" if key in row else " " * 10 for key in ("token_ms", "1", "4", "8", "prefill")
        ]
        print(f"{name:12}{''.join(cells)}")
    print(
        f"a hop costs {statistics.median(hops):.2f} ms over the chain in one process "
        f"({min(hops):.2f} to {max(hops):.2f})"
    )
    if args.json:
        args.json.write_text(json.dumps({"cuts": cuts, "found": found, "hop_ms": hops}, indent=1))
    if args.svg:
        args.svg.write_text(chart(medians))
    processes.close()
    chain.close()
    whole.close()


def chart(medians: dict[str, dict[str, float]]) -> str:
    """Tokens a second over the number of sequences, a line for each way."""
    colours = {"whole": "#4477aa", "chain": "#ccbb44", "processes": "#aa3377"}
    most = max(medians[name][n] for name in colours for n in "148")
    x = {"1": 80, "4": 280, "8": 480}
    rows: list[Any] = ['<text x="20" y="22">tokens/s, all sequences together</text>']
    for i in range(5):
        y = 260 - i * 55
        rows.append(f'<line x1="70" x2="500" y1="{y}" y2="{y}" stroke="#cccccc"/>')
        rows.append(f'<text x="20" y="{y + 4}">{most * i / 4:.0f}</text>')
    for i, (name, colour) in enumerate(colours.items()):
        points = " ".join(f"{x[n]},{260 - 220 * medians[name][n] / most:.1f}" for n in "148")
        rows.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        rows.append(f'<text x="{80 + 140 * i}" y="310" fill="{colour}">{name}</text>')
    rows += [f'<text x="{x[n]}" y="282">{n}</text>' for n in "148"]
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 540 325" font-family="sans-serif" font-size="13">\n'
        + "\n".join(rows)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    main()
