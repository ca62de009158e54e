"""`llamaherd serve` beside llama.cpp's own server: the same model, flags and clients, in one run.

    python benchmarks/serve.py [--rounds 3] [--clients 1 8 32] [--tokens 48] [--svg OUT] [--json OUT]

llama.cpp's server comes in the xllamacpp wheel (pip install xllamacpp). Both servers run at once, each in
processes of its own, and take turns, so that both see the same machine; who waits uses no CPU. A client is
an HTTP connection that streams chat completions one after the other: a system message that all share, and
a question of its own. Greedy, exactly --tokens tokens each (end tokens are ignored). Printed: medians over
the rounds of throughput (tokens/s of all clients together) and of the p50 time to first token, and ratios.

Last, n=8 suggestions: one request for 8 choices against the same at the peer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

SYSTEM = (
    "You are a patient assistant in a library. You answer questions about books, their authors and their "
    "times, in plain words, and you say so when you do not know. Keep to the question that was asked, name "
    "your sources where you can, and never invent a title. If a question is about something else, answer it "
    "as well as you can and keep it short."
)
QUESTIONS = (
    "Who wrote Moby-Dick?",
    "Explain in a few sentences why the printing press changed what people read in the fifteenth century.",
    "Name five novels about the sea.",
    "I read a book about a lighthouse when I was a child. The keeper had a daughter, and there was a storm, "
    "and a ship that came too near. Later the daughter leaves for the city. Do you know which one it was?",
    "What is a sonnet?",
    "Compare the diaries of two travellers of the eighteenth century, one who went north and one south.",
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


PEER = """
import sys, time, xllamacpp as x
path, port, threads, slots, n_ctx = sys.argv[1], *map(int, sys.argv[2:])
p = x.CommonParams()
p.model.path = path
p.hostnames = ["127.0.0.1"] if hasattr(p, "hostnames") else None
p.port, p.n_parallel, p.n_ctx, p.kv_unified = port, slots, n_ctx, True
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = threads
p.n_gpu_layers, p.warmup, p.cache_prompt, p.verbosity = 0, False, True, 0
server = x.Server(p)
print(server.listening_address, flush=True)
time.sleep(1e6)
"""


@dataclass
class Peer:
    """A running server."""

    name: str
    process: subprocess.Popen[str]
    port: int

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def start(name: str, args: argparse.Namespace) -> Peer:
    port = free_port()
    slots, n_ctx = max(args.clients), args.n_ctx
    if name == "llamaherd":
        command = [sys.executable, "-m", "llamaherd", "serve", args.model, "--port", str(port)]
        command += ["--threads", str(args.threads), "--max-sequences", str(slots), "--n-ctx", str(n_ctx)]
        command += ["--log-level", "warning", *args.ours]
    else:
        command = [sys.executable, "-c", PEER, args.model]
        command += [str(v) for v in (port, args.threads, slots, n_ctx)]
    environment = os.environ | (
        {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"} if args.same_wait_policy else {}
    )
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    peer = Peer(name, process, port)
    for _ in range(1200):
        if process.poll() is not None:
            raise SystemExit(f"{name} ended with {process.returncode}")
        try:
            asyncio.run(post(port, body("Hello", 1, stream=False)))
            return peer
        except (OSError, RuntimeError):
            time.sleep(0.1)
    raise SystemExit(f"{name} does not answer")


def body(question: str, tokens: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    fixed = {"messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    return fixed | more


async def post(port: int, request: dict[str, Any]) -> tuple[float, int, list[Any]]:
    """Seconds to the first text, number of pieces, and (if no stream) the choices."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    data = json.dumps(request).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    began = time.perf_counter()
    first, pieces, choices = 0.0, 0, []
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(status.decode() + (await reader.read(500)).decode("utf-8", "replace"))
        if not request["stream"]:
            text = (await reader.read()).decode()
            payload = text[text.index("{") : text.rindex("}") + 1]
            return time.perf_counter() - began, 0, json.loads(payload)["choices"]
        async for line in reader:
            if line.startswith(b"data: {") and b'"content":"' in line and b'"content":""' not in line:
                pieces += 1
                first = first or time.perf_counter() - began
    finally:
        writer.close()
    return first, pieces, choices


async def load(port: int, clients: int, requests: int, tokens: int, salt: str) -> tuple[float, float]:
    """Tokens/s of all clients together, and the p50 time to first token."""
    firsts: list[float] = []

    async def client(i: int) -> None:
        for k in range(requests):
            question = f"({salt}{i}.{k}) {QUESTIONS[(i + k) % len(QUESTIONS)]}"
            first, _, _ = await post(port, body(question, tokens))
            firsts.append(first)

    began = time.perf_counter()
    await asyncio.gather(*(client(i) for i in range(clients)))
    seconds = time.perf_counter() - began
    return clients * requests * tokens / seconds, statistics.median(firsts)


async def suggestions(port: int, tokens: int, salt: str) -> float:
    """Seconds for 8 choices of one prompt."""
    request = body(f"({salt}) Name a book.", tokens, n=8, temperature=0.7, seed=1, stream=False)
    began = time.perf_counter()
    _, _, choices = await post(port, request)
    if len(choices) != 8:  # a server that does not know n: eight requests at once
        began = time.perf_counter()
        more = (request | {"n": 1, "seed": i} for i in range(8))
        await asyncio.gather(*(post(port, r) for r in more))
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--n-ctx", type=int, default=16384)
    parser.add_argument("--ours", nargs="*", default=[], help="further options of llamaherd serve")
    parser.add_argument("--same-wait-policy", action="store_true", help="threads of both wait as ours do")
    parser.add_argument("--svg")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.model is None:
        from llamaherd.demo import demo_model

        args.model = str(demo_model())
    peers = [start(name, args) for name in ("llamaherd", "llama.cpp")]
    results: dict[str, dict[str, list[float]]] = {p.name: {} for p in peers}
    try:
        for round_ in range(args.rounds):
            for clients in args.clients:
                for peer in peers if round_ % 2 == 0 else peers[::-1]:
                    requests = 2 if clients > 4 else 4
                    rate, first = asyncio.run(
                        load(peer.port, clients, requests, args.tokens, f"{round_}-{clients}-")
                    )
                    results[peer.name].setdefault(f"rate {clients}", []).append(rate)
                    results[peer.name].setdefault(f"first {clients}", []).append(first)
                    print(
                        f"round {round_}: {peer.name:10} {clients:3} clients {rate:7.1f} tokens/s, "
                        f"first token {first * 1000:7.0f} ms",
                        flush=True,
                    )
            for peer in peers if round_ % 2 == 0 else peers[::-1]:
                seconds = asyncio.run(suggestions(peer.port, args.tokens, f"s{round_}"))
                results[peer.name].setdefault("suggest", []).append(seconds)
                print(f"round {round_}: {peer.name:10} n=8 in {seconds:.2f} s", flush=True)
    finally:
        for peer in peers:
            peer.stop()
    report(results, args)


def report(results: dict[str, dict[str, list[float]]], args: argparse.Namespace) -> None:
    ours, theirs = results["llamaherd"], results["llama.cpp"]
    print(f"\n{'':24}{'llamaherd':>12}{'llama.cpp':>12}{'ratio':>8}")
    rows = []
    for key in ours:
        a, b = statistics.median(ours[key]), statistics.median(theirs[key])
        label = {"rate": "tokens/s", "first": "p50 first token, s"}.get(key.split()[0], "n=8 suggestions, s")
        clients = f"{key.split()[1]} clients: " if " " in key else ""
        rows.append((clients + label, a, b))
        print(f"{clients + label:28}{a:8.2f}{b:12.2f}{a / b:8.2f}")
    if args.svg:
        with open(args.svg, "w") as file:
            file.write(plot(rows))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


def plot(rows: list[tuple[str, float, float]]) -> str:
    """Bars, each pair scaled to its larger value."""
    height = 44 * len(rows) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="640" height="{height}" fill="#fff"/>',
        '<rect x="200" y="10" width="10" height="10" fill="#8a4b12"/><text x="215" y="19">llamaherd</text>',
        '<rect x="300" y="10" width="10" height="10" fill="#b9b2a6"/><text x="315" y="19">llama.cpp</text>',
    ]
    for i, (label, a, b) in enumerate(rows):
        top = 34 + 44 * i
        parts.append(f'<text x="190" y="{top + 20}" text-anchor="end">{label}</text>')
        for k, (value, colour) in enumerate(((a, "#8a4b12"), (b, "#b9b2a6"))):
            width = 340 * value / max(a, b, 1e-9)
            parts.append(
                f'<rect x="200" y="{top + 16 * k}" width="{width:.0f}" height="14" fill="{colour}"/>'
            )
            parts.append(f'<text x="{206 + width:.0f}" y="{top + 11 + 16 * k}">{value:.3g}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
