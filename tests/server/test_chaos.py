"""The worker is killed while streams are read: nothing is lost, nothing is repeated, nobody sees an error."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import Server, serving

pytestmark = pytest.mark.real

# cells of its own for every sequence: its tokens depend on nobody else, to the last bit
EXACT = ("--max-sequences", "16", "--n-ctx", "16384", "--set", "kv_unified=false")


def bodies(count: int, tokens: int) -> list[dict[str, Any]]:
    """Greedy and seeded streams; half of them chats that share a system message."""
    made: list[dict[str, Any]] = []
    for i in range(count):
        body: dict[str, Any] = {
            "stream": True,
            "max_tokens": tokens,
            "ignore_eos": True,
            "logprobs": 0,
            "seed": i,
            "temperature": 0 if i % 2 else 0.9,
            "prompt": f"Story number {i}: once upon a time",
        }
        if i % 4 >= 2:
            del body["prompt"]
            body["logprobs"] = True
            body["messages"] = [
                {"role": "system", "content": "You are a helpful assistant who tells stories at length."},
                {"role": "user", "content": f"Tell me story number {i}."},
            ]
        made.append(body)
    return made


async def read(
    client: httpx.AsyncClient, body: dict[str, Any], progress: list[int]
) -> list[tuple[str, float]]:
    """Each token's text and log-probability, as the stream brings them."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    pieces: list[tuple[str, float]] = []
    ended = False
    async with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                ended = True
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                shown = choice.get("logprobs")
                if not shown:
                    continue
                if "messages" in body:
                    pieces += [(e["token"], e["logprob"]) for e in shown["content"]]
                else:
                    pieces += list(zip(shown["tokens"], shown["token_logprobs"], strict=True))
                progress[0] += 1
    assert ended
    return pieces


async def run(server: Server, count: int, tokens: int, kills: int, seed: int, stop: bool = False) -> None:
    dice = random.Random(seed)
    wanted = bodies(count, tokens)
    progress = [0]
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        undisturbed = await asyncio.gather(*(read(client, b, progress) for b in wanted))
        assert all(len(pieces) == tokens for pieces in undisturbed)
        server.new_worker()  # both runs begin with an empty cache
        progress[0] = 0
        before = (await _status(server))["restarts"]
        reading = asyncio.gather(*(read(client, b, progress) for b in wanted))
        done = 0
        while done < kills and not reading.done():
            # at random moments: while decoding, and (every fourth) right after a start, in prefill
            target = progress[0] + dice.randint(1, max(2, count * tokens // (kills + 1)))
            while progress[0] < target and not reading.done():
                await asyncio.sleep(0.01)
            await asyncio.sleep(dice.random() * 0.1)
            if reading.done():
                break
            for worker in server.workers:
                worker.send_signal(signal.SIGSTOP if stop and done == 0 else signal.SIGKILL)
                done += 1
            await asyncio.sleep(0.05 if dice.random() < 0.25 else 0)
        disturbed = await reading
    assert done == kills
    for i, (one, other) in enumerate(zip(undisturbed, disturbed, strict=True)):
        assert [t for t, _ in one] == [t for t, _ in other], f"stream {i}"
        assert max(abs(a - b) for (_, a), (_, b) in zip(one, other, strict=True)) < 1e-3
    assert (await _status(server))["restarts"] - before == kills


async def _status(server: Server) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=server.url) as client:
        found: dict[str, Any] = (await client.get("/status")).json()["models"][0]
        return found


def test_three_kills(demo_model_path: Path) -> None:
    with serving("--max-sequences", "16", "--heartbeat-timeout", "60") as server:
        asyncio.run(run(server, count=6, tokens=40, kills=3, seed=1))


def test_a_stopped_worker_is_replaced_under_the_streams(demo_model_path: Path) -> None:
    with serving("--max-sequences", "16", "--heartbeat-timeout", "3") as server:
        asyncio.run(run(server, count=3, tokens=30, kills=1, seed=2, stop=True))


@pytest.mark.chaos
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("options", [("--max-sequences", "16"), EXACT], ids=["defaults", "exact"])
def test_sixteen_streams_and_twenty_kills(demo_model_path: Path, options: tuple[str, ...]) -> None:
    with serving(*options, "--heartbeat-timeout", "60") as server:
        asyncio.run(run(server, count=16, tokens=150, kills=20, seed=3))
