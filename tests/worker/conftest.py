"""Supervisors of real processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from llamaherd import Failed, Finished, GenerationRequest, SamplingConfig, Token
from llamaherd.config import SchedulerConfig
from llamaherd.worker import Supervisor, WorkerConfig

FAKE = "tests.worker.engines:fake"


@contextlib.asynccontextmanager
async def supervised(config: WorkerConfig, **options: Any) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(config, **options)
    try:
        await supervisor.start()
        yield supervisor
    finally:
        await supervisor.close()


def fake_config(**changes: Any) -> WorkerConfig:
    fields = {
        "engine": FAKE,
        "heartbeat": 0.1,
        "scheduler": SchedulerConfig(max_sequences=16, max_queue=1000),
    }
    return WorkerConfig(**fields | changes)


def request(prompt: str = "abc", **fields: Any) -> GenerationRequest:
    defaults: dict[str, Any] = {"max_tokens": 50, "sampling": SamplingConfig(temperature=0.9, seed=1)}
    return GenerationRequest(prompt, **defaults | {"ignore_eos": True} | fields)


async def collect(supervisor: Supervisor, of: GenerationRequest) -> tuple[list[Token], Finished | Failed]:
    tokens = []
    async for event in supervisor.client.submit(of):
        if isinstance(event, Token):
            tokens.append(event)
        else:
            return tokens, event
    raise AssertionError("no terminal event")


async def until(condition: Any, seconds: float = 30) -> None:
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that")
