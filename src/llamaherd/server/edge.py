"""What every HTTP request passes first: its id, its key, its size, its log line."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import QueueFullError, ShuttingDownError
from .errors import error_response
from .pages import PUBLIC_PATHS
from .settings import LLMSTEP_PORT
from .state import House

__all__ = ["Edge"]

log = logging.getLogger("llamaherd.access")

_SANE_ID = re.compile(r"[\w.:-]{1,100}\Z")


class Edge:
    """ASGI middleware.

    Args:
        house: whose settings and metrics.
        paths: known paths, so that unknown ones do not fill the metrics.
    """

    def __init__(self, app: ASGIApp, house: House, paths: frozenset[str]) -> None:
        self._app = app
        self._house = house
        self._paths = paths
        self._keys = [key.encode() for key in house.settings.api_keys]
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._redirect(scope)
        request = Request(scope)
        given = request.headers.get("x-request-id", "")
        number = scope["llamaherd.id"] = given if _SANE_ID.match(given) else uuid.uuid4().hex
        began = time.monotonic()
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", number.encode())]
            await send(message)

        self._open += 1
        try:
            self._check(request)
            await self._app(scope, _Body(self._house, receive).receive, answer)
        except (HTTPException, ShuttingDownError, QueueFullError) as error:
            if not status:
                await error_response(request, error)(scope, receive, answer)
        finally:
            self._open -= 1
            path = request.url.path if request.url.path in self._paths else "other"
            self._house.metrics.http.labels(path, str(status)).inc()
            log.info(
                "%s %s %d",
                request.method,
                request.url.path[:200],
                status,
                extra={
                    "request_id": number,
                    "client": request.client.host if request.client else "",
                    "seconds": round(time.monotonic() - began, 4),
                },
            )

    def _redirect(self, scope: Scope) -> None:
        """Whatever is posted to llmstep's own port is llmstep's: its clients use any path."""
        server = scope.get("server") or ("", 0)
        if self._house.settings.lean and server[1] == LLMSTEP_PORT and scope["method"] == "POST":
            scope["path"] = "/"
            scope["raw_path"] = b"/"

        if scope["method"] == "POST":
            # every body here is JSON, whatever a client calls it (curl -d and Lean's clients name a form)
            headers = [(k, v) for k, v in scope["headers"] if k != b"content-type"]
            scope["headers"] = [*headers, (b"content-type", b"application/json")]

    def _check(self, request: Request) -> None:
        settings = self._house.settings
        self._check_origin(request)
        public = request.method in ("GET", "HEAD") and request.url.path in PUBLIC_PATHS
        if self._keys and not public:
            self._check_key(request.headers.get("authorization", ""), request.headers.get("x-api-key", ""))
        if request.method == "POST":
            if self._house.pool.draining:
                raise ShuttingDownError
            if self._open > settings.max_connections:
                raise QueueFullError(settings.max_connections)
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > settings.max_body:
            raise HTTPException(413, f"the body has {length} bytes; at most {settings.max_body} are taken")

    def _check_origin(self, request: Request) -> None:
        """Pages of other sites may not post here, even where they could not read the answer."""
        origin = request.headers.get("origin")
        allowed = self._house.settings.cors_origins
        if origin is None or request.method in ("GET", "HEAD") or origin in allowed or "*" in allowed:
            return
        if origin.partition("://")[2] != request.headers.get("host", ""):
            raise HTTPException(403, f"pages of {origin[:200]} may not call this server; see --cors-origin")

    def _check_key(self, authorization: str, header: str) -> None:
        kind, _, key = authorization.partition(" ")
        given = (key.strip() if kind.lower() == "bearer" else header).encode()
        matches = [hmac.compare_digest(given, known) for known in self._keys]  # all, whichever is right
        if not any(matches):
            raise HTTPException(401, "this server wants an API key: Authorization: Bearer <key>")


class _Body:
    """A request's body as it arrives: bounded in size and time."""

    def __init__(self, house: House, receive: Callable[[], Awaitable[Message]]) -> None:
        self._most = house.settings.max_body
        self._deadline = time.monotonic() + house.settings.body_timeout
        self._receive = receive
        self._size = 0
        self._whole = False

    async def receive(self) -> Message:
        """The next message."""
        if self._whole:
            return await self._receive()
        try:
            left = self._deadline - time.monotonic()
            message = await asyncio.wait_for(self._receive(), max(left, 0.001))
        except asyncio.TimeoutError as error:
            raise HTTPException(408, "the body did not arrive in time") from error
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            self._whole = not message.get("more_body", False)
            if self._size > self._most:
                raise HTTPException(413, f"the body has more than {self._most} bytes")
        return message
