"""Memory and file descriptors stay where they are, however many requests come."""

from __future__ import annotations

import concurrent.futures
import json
import random
import socket
from pathlib import Path

import httpx
import psutil
import pytest

from .conftest import Server, serving

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(3600)]


def measure(server: Server) -> tuple[int, int, int, int]:
    """Resident bytes and descriptors of the server and of its worker."""
    parent = psutil.Process(server.process.pid)
    (worker,) = server.workers
    return (
        parent.memory_info().rss,
        worker.memory_info().rss - worker.memory_info().shared,
        parent.num_fds(),
        worker.num_fds(),
    )


def some_requests(server: Server, count: int, seed: int) -> None:
    def one(i: int) -> None:
        dice = random.Random(seed * 1_000_000 + i)
        prompt = "word " * dice.randint(1, 12) + str(i)
        body = {"prompt": prompt, "max_tokens": 1, "n": 1 + i % 2, "stream": i % 3 == 0}
        if i % 10 == 0:
            body["max_tokens"] = -1
        if i % 50 == 1:  # dropped
            data = json.dumps(body | {"max_tokens": 50})
            host, port = server.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port))) as client:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
                client.sendall((head + data).encode())
            return
        answer = client_.post("/v1/completions", json=body)
        assert answer.status_code == (400 if i % 10 == 0 else 200)

    with (
        httpx.Client(base_url=server.url, timeout=120) as client_,
        concurrent.futures.ThreadPoolExecutor(12) as pool,
    ):
        list(pool.map(one, range(count)))
    server.wait_idle()


def test_ten_thousand_requests(demo_model_path: Path) -> None:
    with serving("--n-ctx", "1024", "--max-queue", "256") as server:
        some_requests(server, 2000, seed=0)  # caches fill
        before = measure(server)
        some_requests(server, 10_000, seed=1)
        after = measure(server)
        print("before", before, "after", after)
        assert after[0] - before[0] < 12 << 20
        assert after[1] - before[1] < 12 << 20
        assert after[2] - before[2] <= 2
        assert after[3] - before[3] <= 2
