"""A submitted request as its submitter sees it: events to read, and cancel()."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Iterator

from ..errors import ClosedError
from ..types import Event, Failed, Finished

__all__ = ["Handle"]

_LOGGER = logging.getLogger("llamaherd.scheduler")


class Handle:
    """The events of one request. Any thread may read, wait and cancel.

    Iterating yields Token events and one Finished or Failed, then ends.
    """

    def __init__(self, request_id: str, on_cancel: Callable[[Handle], None]) -> None:
        self.request_id = request_id
        self._on_cancel = on_cancel
        self._events: collections.deque[Event] = collections.deque()
        self._changed = threading.Condition()
        self._listener: Callable[[], None] | None = None
        self._terminal: Event | None = None
        self.cancelled = False

    # ------------------------------------------------------------------------- for the submitter

    def cancel(self) -> None:
        """Stop the request, at the latest after the batch in flight; idempotent.

        Its terminal event is Finished; candidates that ran have the reason ``cancelled``.
        """
        if not self.cancelled and self._terminal is None:
            self.cancelled = True
            self._on_cancel(self)

    @property
    def done(self) -> bool:
        """Whether the terminal event is there, read or not."""
        return self._terminal is not None

    @property
    def backlog(self) -> int:
        """Events that nobody has read yet."""
        return len(self._events)

    def next_event(self, timeout: float | None = None) -> Event | None:
        """The next event; None after the terminal one, or when ``timeout`` seconds pass first."""
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._terminal is not None, timeout)
            return self._events.popleft() if self._events else None

    def poll(self) -> Event | None:
        """The next event if one is there."""
        with self._changed:
            return self._events.popleft() if self._events else None

    def __iter__(self) -> Iterator[Event]:
        while True:
            event = self.next_event()
            if event is None:
                return
            yield event

    def result(self, timeout: float | None = None) -> Finished:
        """Wait for the end and return Finished; Token events are thrown away.

        Raises:
            LlamaherdError: the error of Failed.
            TimeoutError: ``timeout`` seconds passed; the request goes on.
        """
        with self._changed:
            if not self._changed.wait_for(self._drained, timeout):
                raise TimeoutError(f"request {self.request_id} has not ended after {timeout:g} s")
        if isinstance(self._terminal, Failed):
            raise self._terminal.error
        if not isinstance(self._terminal, Finished):
            raise ClosedError("request")
        return self._terminal

    def _drained(self) -> bool:
        self._events.clear()
        return self._terminal is not None

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Have a function called, from the scheduler's thread, whenever an event was added.

        One that raises is not called again.
        """
        with self._changed:
            self._listener = listener

    # ------------------------------------------------------------------------- for the scheduler

    def push(self, event: Event) -> None:
        """Add an event; nothing follows a terminal one."""
        with self._changed:
            if self._terminal is not None:
                return
            if isinstance(event, (Finished, Failed)):
                self._terminal = event
            self._events.append(event)
            self._changed.notify_all()
            listener = self._listener
        if listener is not None:
            try:
                listener()
            except Exception:  # the submitter's mistake, which must not end the others' requests
                _LOGGER.exception("the listener of request %s failed", self.request_id)
                self.listen(None)
