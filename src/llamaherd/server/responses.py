"""Responses: JSON by msgspec, and event streams that notice at once when nobody listens any more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["JSON", "ClientGone", "EventStream", "sse", "until_gone"]

T = TypeVar("T")

_encoder = msgspec.json.Encoder(enc_hook=str)


class JSON(Response):
    """A JSON body."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The bytes of the body."""
        return _encoder.encode(content)


class ClientGone(Exception):  # noqa: N818 (nothing is wrong)
    """The client closed its connection; nobody waits for an answer."""


def sse(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _encoder.encode(data) + b"\n\n"


async def _gone(receive: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await work, but cancel it when the client closes its connection. Raises ClientGone then."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class EventStream(Response):
    """Server-sent events. The source is closed as soon as the client is gone, whatever it waits for."""

    media_type = "text/event-stream"

    def __init__(self, source: AsyncIterator[bytes], headers: Mapping[str, str] | None = None) -> None:
        super().__init__(
            headers={"cache-control": "no-store", "x-accel-buffering": "no"} | dict(headers or {})
        )
        del self.headers["content-length"]
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the source ends or the client goes."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        sending = asyncio.ensure_future(self._send_all(send))
        watching = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, watching):
                task.cancel()
            results = await asyncio.gather(sending, watching, return_exceptions=True)
        if isinstance(results[0], Exception) and not isinstance(results[0], OSError):
            raise results[0]

    async def _send_all(self, send: Send) -> None:
        try:
            async for piece in self._source:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            close = getattr(self._source, "aclose", None)
            if close is not None:
                with contextlib.suppress(RuntimeError):
                    await close()
