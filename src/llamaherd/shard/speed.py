"""How fast this machine reads weights while it decodes, measured."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.context import Context
from ..engine.model import Model
from ..engine.protocol import Batch
from ..files.synthesize import synthesize

__all__ = ["measure_speed"]

_LAYERS = 4
_WIDTH = 2048


def measure_speed(*, n_threads: int | None = None, seconds: float = 1.5) -> float:
    """Bytes of weights that decoding one sequence gets through in a second; takes some seconds.

    A random model of 115 MB, more than caches hold, as Q4_0: with the kernels and the threads that a
    stage here would have.

    Args:
        n_threads: as of Context; the CPUs of this process, if None.
        seconds: to decode for.

    Raises:
        LlamaherdError: nothing can be decoded here.
    """
    with tempfile.TemporaryDirectory(prefix="llamaherd-speed-") as folder:
        path = synthesize(
            Path(folder) / "speed.gguf", "llama", layers=_LAYERS, n_embd=_WIDTH, n_heads=16, n_ff=5632,
            n_ctx=256, type="q4_0",
        )  # fmt: skip
        settings: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 1}
        if n_threads is not None:
            settings |= {"n_threads": n_threads, "n_threads_batch": n_threads}
        with Model.load(path) as model, Context(model, **settings) as context:
            sequence = context.memory.allocate()
            one, wanted = np.zeros(1, np.int32), np.ones(1, np.bool_)

            def decode(position: int) -> None:
                context.decode(Batch(one + 3, one + position, one + sequence, wanted))

            for position in range(2):  # the first reads the file
                decode(position)
            count, began = 0, time.perf_counter()
            while count < 2 or (time.perf_counter() - began < seconds and count < 240):
                decode(2 + count)
                count += 1
            return model.size * count / (time.perf_counter() - began)
