"""Clients that go away: while queued, in prefill and while decoding."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from .conftest import Server, serving, wait_for

pytestmark = pytest.mark.real

# each sequence has cells of its own, so that its tokens depend on nobody else to the last bit
EXACT = ("--max-sequences", "4", "--n-ctx", "16384", "--set", "kv_unified=false")
STEADY: dict[str, Any] = {
    "prompt": "The history of the sea begins",
    "max_tokens": 200,
    "temperature": 0.9,
    "seed": 5,
}


def drop(server: Server, body: dict[str, Any], after: float) -> None:
    """Send a request and close the connection after some seconds."""
    data = json.dumps(body)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        client.sendall((head + data).encode())
        time.sleep(after)


def storm(server: Server, count: int) -> None:
    """Dropped at once, after 50 ms and after 500 ms; short prompts, long ones, streams and not."""
    dice = random.Random(9)

    def one(i: int) -> None:
        prompt = "word " * (900 if i % 5 == 0 else 5) + str(i)
        body = {"prompt": prompt, "max_tokens": 300, "n": 1 + i % 3, "stream": i % 2 == 0, "ignore_eos": True}
        drop(server, body, (0, 0.05, 0.5)[i % 3])

    waiting = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    for thread in waiting:
        thread.start()
        time.sleep(dice.random() * 0.02)
    for thread in waiting:
        thread.join()


def check(server: Server, count: int) -> None:
    restarts = server.status()["restarts"]
    with server.client() as client:
        undisturbed = client.post("/v1/completions", json=STEADY).json()["choices"][0]["text"]
        found: list[str] = []

        def steady() -> None:
            with server.client() as own:
                found.append(own.post("/v1/completions", json=STEADY).json()["choices"][0]["text"])

        thread = threading.Thread(target=steady)
        thread.start()
        wait_for(lambda: server.status()["running"] > 0)
        storm(server, count)
        thread.join(240)
        assert found == [undisturbed]
    # nothing but what is left of the last batches may still run
    server.wait_idle(20)
    status = server.status()
    assert status["waiting"] == status["running"] == status["open_requests"] == 0
    assert status["restarts"] == restarts


def test_thirty_requests_dropped(demo_model_path: Path) -> None:
    with serving(*EXACT, "--max-queue", "256") as server:
        check(server, 30)


@pytest.mark.slow
def test_two_hundred_requests_dropped(demo_model_path: Path) -> None:
    with serving(*EXACT, "--max-queue", "256") as server:
        check(server, 200)


def test_a_slot_is_free_within_a_batch(server: Server) -> None:
    """A new request gets its first token soon after a dropped one, which held every slot."""
    server.wait_idle()
    body = {"prompt": "once", "max_tokens": 3000, "n": 16, "ignore_eos": True}
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body)
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        client.sendall((head + data).encode())
        wait_for(lambda: server.status()["running"] == 16)
        steps = server.status()["steps"]
    server.wait_idle(20)
    assert server.status()["steps"] - steps < 40  # the looks at the status take batches, too
