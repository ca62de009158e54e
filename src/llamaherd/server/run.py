"""Runs the application under uvicorn: several ports, patience with clients, an orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..errors import ConfigError, LlamaherdError
from .app import create_app
from .settings import ServerSettings
from .state import House

__all__ = ["bind", "serve"]

log = logging.getLogger("llamaherd.server")

_HEADER_SECONDS = 20.0


class PatientProtocol(HttpToolsProtocol):
    """uvicorn's, which also hangs up on who opens a connection and does not finish its request's head."""

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection came: its first request has some seconds to begin."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Data came."""
        super().data_received(data)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait(self) -> None:
        if not self._idle():
            self._stop_waiting()
        elif self._patience is None:
            self._patience = self.loop.call_later(_HEADER_SECONDS, self._give_up)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        if self._idle() and not self.transport.is_closing():
            self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn's server; a first signal lets what runs finish, a second one ends it at once."""

    house: House
    failure: LlamaherdError | None = None
    _signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        self._signals += 1
        if self._signals > 1:
            self.should_exit = self.force_exit = True
            return
        log.info("%s: finishing what runs; once more to stop at once", signal.Signals(sig).name)
        asyncio.get_running_loop().call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._draining = asyncio.ensure_future(self._finish())

    async def _finish(self) -> None:
        await self.house.pool.drain(self.house.settings.shutdown_grace)
        self.should_exit = True

    def fail(self, error: LlamaherdError) -> None:
        """End because of an error."""
        self.failure = error
        self.should_exit = True


def bind(settings: ServerSettings) -> list[socket.socket]:
    """Sockets that listen at the settings' addresses.

    Raises:
        ConfigError: an address cannot be had.
    """
    sockets: list[socket.socket] = []
    try:
        for host, port in settings.addresses:
            sockets.append(_bound(host, port))
    except OSError as error:
        for listener in sockets:
            listener.close()
        raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror}; choose another port") from error
    return sockets


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def serve(settings: ServerSettings, sockets: list[socket.socket], **uvicorn_options: Any) -> None:
    """Serve until a signal comes.

    Raises:
        LlamaherdError: the default model cannot be loaded.
    """
    server: _Server
    app = create_app(settings, on_failure=lambda error: server.fail(error))
    options: dict[str, Any] = {
        "http": PatientProtocol,
        "ws": "none",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "backlog": 2048,
        "timeout_keep_alive": 30,
        "timeout_graceful_shutdown": 5,
    }
    server = _Server(uvicorn.Config(app, **options | uvicorn_options))
    server.house = app.state.house
    server.run(sockets=sockets)
    if server.failure is not None:
        raise server.failure
