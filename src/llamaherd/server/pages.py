"""The page at ``/``, health, figures for the page, and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from ..replicas.fleet import Fleet
from .pool import Served
from .responses import JSON
from .state import house_of

__all__ = ["PUBLIC_PATHS", "router"]

router = APIRouter()

_STATIC = Path(__file__).parent / "static"
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/static/style.css": ("style.css", "text/css; charset=utf-8"),
    "/static/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/static/plot.js": ("plot.js", "text/javascript; charset=utf-8"),
}
PUBLIC_PATHS = frozenset({*_FILES, "/health"})
"""What needs no key: the page has to load before somebody can type one in."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def _static(path: str) -> Response:
    name, kind = _FILES[path]
    headers = {"content-security-policy": _POLICY, "cache-control": "no-cache"}
    return Response((_STATIC / name).read_bytes(), media_type=kind, headers=headers)


for _path in _FILES:
    router.add_api_route(
        _path, lambda path=_path: _static(path), methods=["GET"], include_in_schema=False, name=_path
    )


@router.get("/health", summary="Whether the server can answer")
async def health(request: Request) -> Response:
    """200 when the default model's worker answers; 503 while it loads, restarts or the server stops."""
    pool = house_of(request).pool
    if pool.ready:
        return JSON({"status": "ready"})
    status = "stopping" if pool.draining else "loading"
    return JSON({"status": status}, status_code=503, headers={"retry-after": "1"})


@router.get("/metrics", summary="Prometheus metrics")
async def metrics(request: Request) -> Response:
    """Everything in Prometheus' text format."""
    return Response(house_of(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/status", summary="What goes on, for the page")
async def status(request: Request) -> Response:
    """Figures of each model's worker."""
    pool = house_of(request).pool
    loaded = {s.name: s for s in pool.loaded}
    return JSON({"ready": pool.ready, "models": [_status(name, loaded.get(name)) for name in pool.names]})


def _status(name: str, served: Served | None) -> dict[str, Any]:
    if served is None:
        return {"name": name, "loaded": False}
    supervisor = served.supervisor
    return {
        "name": name,
        "loaded": True,
        "ready": supervisor.ready,
        "restarts": supervisor.restarts,
        "last_death": supervisor.last_death,
        "open_requests": served.client.open_requests,
        "description": served.info.description,
        "context_length": served.info.n_ctx,
        "chat": served.info.chat_template is not None,
        **msgspec.structs.asdict(supervisor.stats),
        "stages": [msgspec.structs.asdict(stage) for stage in supervisor.stats.stages],
        "replicas": _replicas(supervisor) if isinstance(supervisor, Fleet) else [],
    }


def _replicas(fleet: Fleet) -> list[dict[str, Any]]:
    loads = fleet.client.loads
    return [
        {
            "name": name,
            "ready": look.ready,
            "host": look.host,
            "pid": look.pid,
            "open_requests": loads[name],
            "restarts": look.restarts,
            "used_cells": look.stats.used_cells,
            "n_cells": look.stats.n_cells,
            "prefilled_tokens": look.stats.prefilled_tokens,
            "reused_tokens": look.stats.reused_tokens,
        }
        for name, look in fleet.replicas.items()
    ]
