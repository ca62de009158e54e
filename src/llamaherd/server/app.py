"""The ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from ..errors import InvalidParameterError, LlamaherdError
from . import lean, openai, pages, suggest
from .edge import Edge
from .errors import error_response
from .metrics import Metrics
from .pool import Pool
from .responses import ClientGone
from .settings import ServerSettings
from .state import House

__all__ = ["create_app"]

log = logging.getLogger("llamaherd.server")


def create_app(
    settings: ServerSettings, on_failure: Callable[[LlamaherdError], None] | None = None
) -> FastAPI:
    """The application, which any ASGI server can run; its workers start with its lifespan.

    Args:
        settings: what to serve.
        on_failure: called if the default model cannot be loaded at the start.
    """
    pool = Pool(settings)
    house = House(settings, pool, Metrics(lambda: pool.loaded))

    async def preload() -> None:
        try:
            await pool.get()
        except LlamaherdError as error:
            if not pool.draining:
                log.critical("the default model cannot be loaded: %s", error)
                if on_failure is not None:
                    on_failure(error)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(preload())
        try:
            yield
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await pool.close()

    app = FastAPI(
        title="llamaherd",
        summary="llama.cpp behind OpenAI's, llmstep's and LeanCopilot's protocols",
        version=_version(),
        lifespan=lifespan,
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
        strict_content_type=False,  # Lean's clients name none, or another
        responses={"4XX": {"description": "The request cannot be served; see error.message."}},
    )
    app.state.house = house
    routers = [part.router for part in (openai, lean, suggest, pages)]
    for router in routers:
        app.include_router(router)
    for kind in (Exception, HTTPException, LlamaherdError):
        app.add_exception_handler(kind, error_response)
    app.add_exception_handler(RequestValidationError, _invalid)  # type: ignore[arg-type]
    app.add_exception_handler(ClientGone, _gone)
    paths = frozenset(r.path for router in routers for r in router.routes if isinstance(r, APIRoute))
    app.add_middleware(Edge, house=house, paths=paths)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-api-key", "x-request-id"],
        )
    return app


def _version() -> str:
    try:
        return importlib.metadata.version("llamaherd")
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return "unknown"


async def _invalid(request: Request, error: RequestValidationError) -> Response:
    """A body of the wrong shape: 400 with the place and the reason, as OpenAI has it."""
    first = error.errors()[0]
    place = ".".join(str(p) for p in first["loc"] if p != "body")
    message = first["msg"]
    if first["type"] == "json_invalid":
        place, message = "body", f"it is no JSON: {first.get('ctx', {}).get('error', '')}"
    found = InvalidParameterError(place[:200], _short(first.get("input")), message)
    return error_response(request, found)


def _short(value: object) -> object:
    """The value at fault, without whole bodies in error messages."""
    return value if isinstance(value, (int, float)) or value is None else f"{value!s:.60}"


async def _gone(request: Request, error: Exception) -> Response:
    """Nobody reads this."""
    return Response(status_code=499)
