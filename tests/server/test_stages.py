"""A server whose model is cut into stages; any of its processes may be killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from .conftest import Server, serving, wait_for
from .test_chaos import bodies, read

pytestmark = pytest.mark.real

SETTINGS = ("--max-sequences", "8", "--n-ctx", "4096", "--set", "kv_unified=false")


def stages_of(server: Server) -> list[psutil.Process]:
    (worker,) = server.workers
    return worker.children()


async def streams(
    server: Server, count: int, tokens: int, act: Callable[[], None] | None = None
) -> list[list[tuple[str, float]]]:
    progress = [0]
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        readers = [asyncio.create_task(read(client, body, progress)) for body in bodies(count, tokens)]
        if act is not None:
            while progress[0] < count * 4:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(act)
        return await asyncio.gather(*readers)


def test_streams_over_killed_stages_and_a_killed_worker(demo_model_path: Path) -> None:
    with serving(*SETTINGS) as server:
        expected = asyncio.run(streams(server, 6, 24))
    with serving(*SETTINGS, "--stages", "3") as server:
        with server.client() as client:
            model = client.get("/v1/models").json()["data"][0]
        assert asyncio.run(streams(server, 6, 24)) == expected
        for victim in (0, 2):
            before = stages_of(server)
            found = asyncio.run(streams(server, 6, 24, lambda v=victim, b=before: b[v].kill()))
            assert found == expected
            assert [p.pid for p in stages_of(server)] != [p.pid for p in before]
        assert server.status()["restarts"] == 0
        old = stages_of(server)
        found = asyncio.run(streams(server, 6, 24, lambda: os.kill(server.workers[0].pid, signal.SIGKILL)))
        assert [[text for text, _ in stream] for stream in found] == [
            [text for text, _ in stream] for stream in expected
        ]
        assert server.status()["restarts"] == 1
        wait_for(lambda: not any(p.is_running() and p.status() != "zombie" for p in old))
        last = stages_of(server)
        assert len(last) == 3
        assert model["architecture"] == "llama"
        assert model["context_length"] > 0
    wait_for(lambda: not any(p.is_running() and p.status() != "zombie" for p in last))
