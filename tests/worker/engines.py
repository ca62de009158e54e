"""Engines for worker processes: named in WorkerConfig.engine, made inside of the process."""

from __future__ import annotations

import os
import signal
import threading
import time

from llamaherd.engine.protocol import Batch
from llamaherd.testing import FakeEngine

ABORTS, SLEEPS, GROWS, FAULTS = "\x01" * 3, "\x02" * 3, "\x03" * 3, "\x04" * 3
"""Texts that make these engines do what no request should; thrice, so that no sampling comes upon them."""

_hoard: list[bytearray] = []


def _misbehave(batch: Batch) -> None:
    time.sleep(0.002)
    text = b"" if batch.tokens is None else bytes(t for t in batch.tokens.tolist() if t < 256)
    if ABORTS.encode() in text:
        os.abort()
    if SLEEPS.encode() in text:
        time.sleep(1000)
    if GROWS.encode() in text:
        _hoard.append(bytearray(os.urandom(1) * (300 << 20)))
        time.sleep(1000)
    if FAULTS.encode() in text:
        # as a real fault does, in this thread and at once: a signal to the process may be taken by another
        # one, while this one still computes the batch and its tokens acquit the request
        signal.pthread_kill(threading.get_ident(), signal.SIGSEGV)


def fake() -> FakeEngine:
    """Sixteen sequences of pseudo-random text, 2 ms a batch."""
    return FakeEngine(n_sequences=32, n_ctx=8192, n_batch=256, on_decode=_misbehave)


def broken() -> FakeEngine:
    """Does not start."""
    os.abort()


def refusing() -> FakeEngine:
    """Says why it does not start."""
    from llamaherd.errors import ModelNotFoundError

    raise ModelNotFoundError("/no/such.gguf")
