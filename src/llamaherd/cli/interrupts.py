"""Ctrl-C while native code runs in the main thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupted", "deferred_interrupt"]


class Interrupted:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.yes = False

    def note(self, _signal: int, _frame: FrameType | None) -> None:
        """A signal handler that only takes note."""
        self.yes = True


@contextmanager
def deferred_interrupt() -> Iterator[Interrupted]:
    """Hold KeyboardInterrupt back until the block ends.

    Raised inside a callback that C calls (llama.cpp's log, for one), it would be printed and lost.
    """
    interrupted = Interrupted()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    before = signal.signal(signal.SIGINT, interrupted.note)
    try:
        yield interrupted
    except BaseException:
        if interrupted.yes:  # whatever failed, failed because we were asked to stop
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted.yes:
        raise KeyboardInterrupt
