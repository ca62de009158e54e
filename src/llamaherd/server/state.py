"""What all endpoints share, and how a request is run."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from starlette.requests import Request

from ..types import Event, Failed, Finished, GenerationRequest
from .metrics import Metrics
from .pool import Pool, Served
from .settings import ServerSettings

__all__ = ["House", "house_of"]

log = logging.getLogger("llamaherd.server")


@dataclass
class House:
    """The server's parts."""

    settings: ServerSettings
    pool: Pool
    metrics: Metrics

    async def events(self, served: Served, request: GenerationRequest) -> AsyncGenerator[Event, None]:
        """Run a request; closing the iterator cancels it. Raises QueueFullError, WorkerError at once."""
        async with (
            served.client.submit(request) as stream,
            aclosing(self.metrics.watch(served.name, stream)) as watched,
        ):
            async for event in watched:
                yield event

    async def finish(self, served: Served, request: GenerationRequest) -> Finished:
        """Run a request to its end. Raises the error that ended it."""
        async with aclosing(self.events(served, request)) as events:
            async for event in events:
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Finished):
                    return event
        raise AssertionError("a stream ended without its last event")


def house_of(request: Request) -> House:
    """The server that a request came to."""
    return cast(House, request.app.state.house)
