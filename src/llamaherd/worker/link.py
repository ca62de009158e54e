"""The sockets to one worker process."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from . import wire

__all__ = ["Link"]


class Link:
    """Sends to and receives from one worker. For one event loop.

    Args:
        folder: a private folder (mode 0700) for the sockets.
        name: of this worker; no two share one.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._paths = (folder / f"{name}.up", folder / f"{name}.down")
        self.up, self.down = (f"ipc://{path}" for path in self._paths)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._receiver = zmq.asyncio.Socket(self._context, zmq.PULL)
        self._receiver.setsockopt(zmq.LINGER, 0)
        self._receiver.bind(self.up)
        self._sender = self._context.socket(zmq.PUSH)
        self._sender.setsockopt(zmq.LINGER, 1000)
        # what waits here is bounded by the requests that are open; sending never blocks the loop
        self._sender.setsockopt(zmq.SNDHWM, 0)
        self._sender.connect(self.down)
        self.closed = False

    def send(self, message: wire.Down) -> None:
        """Send; a worker that is gone gets nothing, and its death is noticed elsewhere."""
        if not self.closed:
            with contextlib.suppress(zmq.Again):
                self._sender.send(wire.encode(message), zmq.NOBLOCK)

    async def receive(self) -> wire.Up:
        """The next message. Raises msgspec.MsgspecError if it is none."""
        return wire.decode_up(await self._receiver.recv())

    async def drain(self) -> list[wire.Up]:
        """What has arrived already, after the worker's end."""
        messages: list[wire.Up] = []
        while await self._receiver.poll(0):
            with contextlib.suppress(msgspec.MsgspecError):
                messages.append(await self.receive())
        return messages

    def close(self) -> None:
        """Close the sockets and remove their files; idempotent."""
        if self.closed:
            return
        self.closed = True
        self._receiver.close()
        self._sender.close()
        for path in self._paths:
            path.unlink(missing_ok=True)
