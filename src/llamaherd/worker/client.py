"""Requests as the server sees them: streams of events that do not mind a worker's death.

What was sent to a worker that died is sent to the next one, beginning where it was. After a death that a
request may have caused, those that were under way are tried one by one, so that the one that did it fails
alone.
"""

from __future__ import annotations

import abc
import asyncio
import collections
import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import ClosedError, LlamaherdError, QueueFullError, SlowReaderError, WorkerDiedError
from ..types import Event, Failed, Finished, GenerationRequest, Prompt, Token, Usage
from . import wire
from .link import Link
from .record import Record

__all__ = ["Calls", "Death", "Embeddings", "RequestStream", "WorkerClient"]

log = logging.getLogger(__name__)

_MOST_STRIKES = 2
_MOST_FUTILE_DEATHS = 5


@dataclass(frozen=True)
class Death:
    """How a worker ended, and whether a request may be to blame."""

    how: str
    blames: bool


@dataclass(frozen=True)
class Embeddings:
    """float32 [n, width], and the tokens of all inputs together."""

    rows: NDArray[np.float32]
    n_tokens: int


class RequestStream(AsyncIterator[Event]):
    """The events of one request: ``async for`` gives Token events and one Finished or Failed.

    cancel() ends the request at the latest after the batch in flight; so does leaving ``async with``.
    """

    def __init__(self, request_id: str, limit: int, on_cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self._limit = limit
        self._on_cancel = on_cancel
        self._events: collections.deque[Event] = collections.deque()
        self._changed = asyncio.Event()
        self._ended = False  # the terminal event is there
        self._read = False  # and was read

    async def __anext__(self) -> Event:
        while not self._events:
            if self._read:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        event = self._events.popleft()
        if isinstance(event, (Finished, Failed)):
            self._read = True
        return event

    async def batches(self) -> AsyncGenerator[list[Event], None]:
        """The same events, those that have come meanwhile together."""
        async for event in self:
            batch = [event, *self._events]
            self._events.clear()
            self._read = self._read or isinstance(batch[-1], (Finished, Failed))
            yield batch

    async def result(self) -> Finished:
        """Wait for the end; Token events are thrown away. Raises the error of Failed."""
        async for event in self:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                return event
        raise ClosedError("stream")

    def cancel(self) -> None:
        """Stop the request; idempotent. No further events come."""
        if not self._ended:
            self._ended = self._read = True
            self._events.clear()
            self._changed.set()
            self._on_cancel()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def push(self, event: Event) -> None:
        """An event has come; one that comes after the end is dropped."""
        if self._ended:
            return
        if isinstance(event, Token) and len(self._events) >= self._limit:
            self._on_cancel()
            event = Failed(SlowReaderError(self._limit), Usage(0, 0))
            self._events.clear()
        if isinstance(event, (Finished, Failed)):
            self._ended = True
        self._events.append(event)
        self._changed.set()


@dataclass
class _Open:
    """A request or call that has not ended."""

    number: int
    record: Record | None = None
    stream: RequestStream | None = None
    call: wire.TokenizeCall | wire.EmbedCall | None = None
    reply: asyncio.Future[wire.Reply] | None = None
    strikes: int = 0
    sent: bool = False


class Calls(abc.ABC):
    """What is asked of whoever answers call()."""

    @abc.abstractmethod
    async def call(self, call: wire.TokenizeCall | wire.EmbedCall) -> wire.Reply:
        """The answer to a question. Raises the error that it answers with."""

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids."""
        reply = await self.call(wire.TokenizeCall(wire.pack_prompt(prompt)))
        return reply.tokens or []

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of token ids. Raises TokenError."""
        reply = await self.call(wire.TokenizeCall(wire.WirePrompt(tokens=list(tokens)), detokenize=True))
        return reply.text or ""

    async def embed(self, prompts: Sequence[Prompt], *, normalize: bool = True) -> Embeddings:
        """Embeddings of prompts, as many as fit in one batch. Raises PromptTooLongError, RequestError."""
        call = wire.EmbedCall([wire.pack_prompt(p) for p in prompts], normalize)
        reply = await self.call(call)
        rows = np.frombuffer(reply.rows or b"", np.float32).reshape(len(prompts), reply.width)
        return Embeddings(rows, reply.n_tokens)


class WorkerClient(Calls):
    """Talks to whichever worker there is. For one event loop.

    Args:
        max_open: requests that may be open; one more is refused with QueueFullError.
        max_buffered_events: events that a request may hold unread before it is cancelled.
    """

    def __init__(self, *, max_open: int, max_buffered_events: int = 4096) -> None:
        self._max_open = max_open
        self._max_buffered = max_buffered_events
        self._open: dict[int, _Open] = {}
        self._requests = 0
        self._numbers = 0
        self._link: Link | None = None
        self._suspects: collections.deque[int] = collections.deque()
        self._on_trial: int | None = None
        self._futile_deaths = 0
        self._refusal: LlamaherdError | None = None
        self.events = 0  # in all

    # ------------------------------------------------------------------------------------ for users

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Start a request.

        Raises:
            QueueFullError: max_open requests are open already.
            LlamaherdError: no worker can be had.
        """
        self.check()
        if self._requests >= self._max_open:
            raise QueueFullError(self._max_open)
        self._requests += 1
        self._numbers += 1
        cancel = functools.partial(self._cancel, self._numbers)
        stream = RequestStream(request.request_id, self._max_buffered, cancel)
        self._open[self._numbers] = _Open(self._numbers, record=Record(request), stream=stream)
        self._pump()
        return stream

    async def call(self, call: wire.TokenizeCall | wire.EmbedCall) -> wire.Reply:
        """A worker's answer to a question. Raises the error that it answers with."""
        self.check()
        self._numbers += 1
        number = self._numbers
        future: asyncio.Future[wire.Reply] = asyncio.get_running_loop().create_future()
        self._open[number] = _Open(number, call=call, reply=future)
        self._pump()
        try:
            reply = await future
        finally:
            self._forget(number)
        if reply.error is not None:
            raise wire.unpack_error(reply.error)
        return reply

    def check(self) -> None:
        """Raise the error for which no worker can be had, if there is one."""
        if self._refusal is not None:
            raise self._refusal

    @property
    def open_requests(self) -> int:
        """Requests that have not ended."""
        return self._requests

    # ------------------------------------------------------------------------------ for the supervisor

    def attach(self, link: Link) -> None:
        """A worker is ready: send it all that is open."""
        self._refusal = None
        self._link = link
        self._pump()

    def detach(self, death: Death) -> None:
        """The worker died. What was under way is kept for the next one, or fails for having caused it."""
        self._link = None
        sent = [o for o in self._open.values() if o.sent]
        for entry in sent:
            entry.sent = False
        on_trial, self._on_trial = self._on_trial, None
        if death.blames:
            self._blame(sent, on_trial, death)
        elif on_trial is not None:
            self._suspects.appendleft(on_trial)
        if sent:
            self._futile_deaths += 1
        if self._futile_deaths >= _MOST_FUTILE_DEATHS:
            self._futile_deaths = 0
            for entry in sent:
                message = (
                    f"the worker died {_MOST_FUTILE_DEATHS} times without getting on with any request "
                    f"(the last time {death.how}), and this one was under way each time"
                )
                self._fail(entry, WorkerDiedError(message, death.how))

    def _blame(self, sent: list[_Open], on_trial: int | None, death: Death) -> None:
        suspects = sent if on_trial is None else [o for o in sent if o.number == on_trial]
        for entry in suspects:
            self._strike(entry)
            if self._strikes(entry) >= _MOST_STRIKES:
                message = f"the worker died twice over this request, which is not tried again: it {death.how}"
                self._fail(entry, WorkerDiedError(message, death.how))
            else:
                self._suspects.append(entry.number)

    @staticmethod
    def _strike(entry: _Open) -> None:
        if entry.record is not None:
            entry.record.strikes += 1
        else:
            entry.strikes += 1

    @staticmethod
    def _strikes(entry: _Open) -> int:
        return entry.record.strikes if entry.record is not None else entry.strikes

    def refuse(self, error: LlamaherdError) -> None:
        """No worker can be had: end all that is open, and refuse what comes, until attach()."""
        self._refusal = error
        self._link = None
        for entry in list(self._open.values()):
            self._fail(entry, error)

    def receive(self, message: wire.Up) -> None:
        """Take in a worker's message."""
        if isinstance(message, wire.Events):
            for number, token in message.tokens:
                self._take(number, token)
            for number, finished in message.finished:
                self._take(number, finished)
            for number, error, usage in message.failed:
                self._take(number, Failed(wire.unpack_error(error), usage))
        elif isinstance(message, wire.Reply):
            self._futile_deaths = 0
            entry = self._open.get(message.id)
            if entry is not None and entry.reply is not None and not entry.reply.done():
                entry.reply.set_result(message)
                self._acquit(message.id)

    # ---------------------------------------------------------------------------------------- within

    def _take(self, number: int, event: Event) -> None:
        self.events += 1
        self._futile_deaths = 0
        entry = self._open.get(number)
        if entry is None or entry.record is None or entry.stream is None:
            return  # cancelled meanwhile
        if isinstance(event, Token):
            entry.record.token(event)
        elif isinstance(event, Finished):
            event = entry.record.finished(event)
        if not isinstance(event, Token):
            self._forget(number)
        entry.stream.push(event)
        self._acquit(number)

    def _acquit(self, number: int) -> None:
        """The request on trial got on: let the next ones in."""
        if number == self._on_trial:
            self._on_trial = None
            self._pump()

    def _pump(self) -> None:
        """Send what may be sent."""
        if self._link is None or self._on_trial is not None:
            return
        while self._suspects:
            entry = self._open.get(self._suspects.popleft())
            if entry is not None and not entry.sent:
                self._on_trial = entry.number
                self._send(entry)
                return
        for entry in list(self._open.values()):
            if not entry.sent:
                self._send(entry)

    def _send(self, entry: _Open) -> None:
        assert self._link is not None
        entry.sent = True
        if entry.call is not None:
            self._link.send(wire.Call(entry.number, entry.call))
            return
        assert entry.record is not None
        going_on = entry.record.resume()
        if isinstance(going_on, Finished):
            self._take(entry.number, going_on)
        else:
            self._link.send(wire.Submit(entry.number, wire.pack_request(going_on)))

    def _cancel(self, number: int) -> None:
        entry = self._forget(number)
        if entry is not None and entry.sent and self._link is not None:
            self._link.send(wire.Cancel(number))
        self._acquit(number)

    def _forget(self, number: int) -> _Open | None:
        entry = self._open.pop(number, None)
        if entry is not None and entry.record is not None:
            self._requests -= 1
        return entry

    def _fail(self, entry: _Open, error: LlamaherdError) -> None:
        self._forget(entry.number)
        if entry.reply is not None and not entry.reply.done():
            entry.reply.set_exception(error)
        if entry.stream is not None and entry.record is not None:
            log.warning("request %s failed: %s", entry.stream.request_id, error)
            entry.stream.push(Failed(error, entry.record.usage()))
