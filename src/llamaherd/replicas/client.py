"""Requests to several replicas: a stream goes on at another one when its replica is lost."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from ..errors import LlamaherdError, QueueFullError, WorkerDiedError
from ..types import Failed, Finished, GenerationRequest, Prompt, Usage
from ..worker import wire
from ..worker.client import Calls, RequestStream
from ..worker.record import Record
from .affinity import Affinity

__all__ = ["Replica", "ReplicaLostError", "ReplicasClient"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_MOST_SETBACKS = 5
_PAUSE = 0.2  # seconds before a request is tried again


class ReplicaLostError(Exception):
    """A replica cannot be reached, or broke off."""


class Replica(Protocol):
    """An engine somewhere, with a worker of its own that is replaced there when it dies."""

    def generate(self, submit: bytes) -> AsyncGenerator[bytes, None]:
        """The Events of a Submit. Raises ReplicaLostError; closing the iterator cancels the request."""
        ...

    async def call(self, call: bytes) -> bytes:
        """The Reply to a Call. Raises ReplicaLostError."""
        ...


@dataclasses.dataclass
class _Member:
    replica: Replica
    ready: bool = False
    requests: int = 0
    lost: asyncio.Future[str] | None = None  # done, with the cause, when what is under way there is given up


class ReplicasClient(Calls):
    """What `WorkerClient` is to one worker, to several replicas. For one event loop.

    Args:
        replicas: by their names.
        max_open: requests that may be open; one more is refused with QueueFullError.
        max_buffered_events: events that a request may hold unread before it is cancelled.
    """

    def __init__(
        self, replicas: Mapping[str, Replica], *, max_open: int, max_buffered_events: int = 4096
    ) -> None:
        self._members = {name: _Member(replica) for name, replica in replicas.items()}
        self._affinity = Affinity()
        self._max_open = max_open
        self._max_buffered = max_buffered_events
        self._tasks: dict[RequestStream, asyncio.Task[None]] = {}
        self._some_ready = asyncio.Event()
        self._refusal: LlamaherdError | None = None

    # ------------------------------------------------------------------------------------ for users

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Start a request.

        Raises:
            QueueFullError: max_open requests are open already.
            LlamaherdError: no replica can be had.
        """
        if self._refusal is not None:
            raise self._refusal
        if len(self._tasks) >= self._max_open:
            raise QueueFullError(self._max_open)

        def cancel() -> None:
            task.cancel()

        stream = RequestStream(request.request_id, self._max_buffered, cancel)
        task = asyncio.create_task(self._run(Record(request), stream))
        self._tasks[stream] = task
        task.add_done_callback(lambda done: self._tasks.pop(stream, None))
        return stream

    @property
    def open_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._tasks)

    # ---------------------------------------------------------------------------------- for the fleet

    def set_ready(self, name: str, ready: bool) -> None:
        """Whether a replica takes requests now."""
        member = self._members[name]
        if member.ready and not ready:
            self._affinity.forget(name)
        member.ready = ready
        if ready:
            self._refusal = None
        if self._refusal is not None or any(m.ready for m in self._members.values()):
            self._some_ready.set()
        else:
            self._some_ready.clear()

    def give_up(self, name: str, cause: str) -> None:
        """A replica is lost without a word: what is under way there goes on elsewhere."""
        self.set_ready(name, False)
        lost, self._members[name].lost = self._members[name].lost, None
        if lost is not None:
            lost.set_result(cause)

    @property
    def loads(self) -> dict[str, int]:
        """Requests of each replica."""
        return {name: member.requests for name, member in self._members.items()}

    def refuse(self, error: LlamaherdError) -> None:
        """End all that is open with this error, and refuse what comes, until a replica is ready."""
        self._refusal = error
        self._some_ready.set()  # calls that wait for one learn it
        for stream, task in list(self._tasks.items()):
            stream.push(Failed(error, Usage(0, 0)))
            task.cancel()

    # ---------------------------------------------------------------------------------------- within

    async def _run(self, record: Record, stream: RequestStream) -> None:
        async def attempt(replica: Replica) -> bool:
            going_on = record.resume()
            if isinstance(going_on, Finished):
                self._end(stream, going_on)
                return True
            return await self._follow(replica, going_on, record, stream)

        try:
            await self._persist(record.request.prompt, attempt, record)
        except LlamaherdError as error:
            log.warning("request %s failed: %s", stream.request_id, error)
            self._end(stream, Failed(error, record.usage()))

    def _end(self, stream: RequestStream, event: Finished | Failed) -> None:
        """The last event of a stream, which counts no more."""
        self._tasks.pop(stream, None)
        stream.push(event)

    async def _follow(
        self, replica: Replica, request: GenerationRequest, record: Record, stream: RequestStream
    ) -> bool:
        """Pass a replica's events on until the last one. Raises ReplicaLostError."""
        packed = wire.encode(wire.Submit(0, wire.pack_request(request)))
        async with contextlib.aclosing(replica.generate(packed)) as messages:
            async for data in messages:
                events = wire.decode_up(data)
                assert isinstance(events, wire.Events)
                for _, token in events.tokens:
                    record.token(token)
                    stream.push(token)
                for _, finished in events.finished:
                    self._end(stream, record.finished(finished))
                    return True
                for _, error, usage in events.failed:
                    self._end(stream, Failed(wire.unpack_error(error), usage))
                    return True
        raise ReplicaLostError("it ended without a last event")

    async def call(self, call: wire.TokenizeCall | wire.EmbedCall) -> wire.Reply:
        """A replica's answer to a question. Raises the error that it answers with."""
        packed = wire.encode(wire.Call(0, call))

        async def attempt(replica: Replica) -> wire.Reply:
            reply = wire.decode_up(await replica.call(packed))
            assert isinstance(reply, wire.Reply)
            return reply

        reply = await self._persist((), attempt)
        if reply.error is not None:
            raise wire.unpack_error(reply.error)
        return reply

    async def _persist(
        self,
        prompt: Prompt,
        attempt: Callable[[Replica], Coroutine[Any, Any, _T]],
        record: Record | None = None,
    ) -> _T:
        """Try it with one replica after another. Raises WorkerDiedError: too many were lost over it."""
        count = _Setbacks() if record is None else record
        while True:
            await self._some_ready.wait()
            if self._refusal is not None:
                raise self._refusal
            loads = {name: m.requests for name, m in self._members.items() if m.ready}
            if not loads:
                continue
            name = self._affinity.choose(prompt, loads)
            member = self._members[name]
            member.requests += 1
            try:
                return await _unless_lost(attempt(member.replica), member)
            except ReplicaLostError as error:
                log.warning("replica %s was lost: %s", name, error)
                count.setbacks += 1
                self.set_ready(name, False)
                if count.setbacks >= _MOST_SETBACKS:
                    raise WorkerDiedError(
                        f"{_MOST_SETBACKS} replicas were lost while this request was under way, which is not "
                        f"tried again (the last one: {error})",
                        str(error),
                    ) from error
            finally:
                member.requests -= 1
            await asyncio.sleep(_PAUSE)


async def _unless_lost(attempt: Coroutine[Any, Any, _T], member: _Member) -> _T:
    """What an attempt comes to. Raises ReplicaLostError when its replica is given up meanwhile."""
    if member.lost is None:
        member.lost = asyncio.get_running_loop().create_future()
    lost = member.lost
    task = asyncio.create_task(attempt)
    try:
        either: set[asyncio.Future[Any]] = {task, lost}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ReplicaLostError(lost.result())
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_PAUSE)


@dataclasses.dataclass
class _Setbacks:
    setbacks: int = 0
