"""A stage's process. It takes its settings from standard input, says on standard output where it listens, and
ends when standard input closes: with its parent, however that ends.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback

import msgspec

from ..errors import LlamaherdError
from ..wire_errors import WireError, pack_error
from . import wire
from .server import StageServer
from .slices import SliceStore
from .stage import Stage

__all__ = ["Started", "main"]


class Started(msgspec.Struct, frozen=True):
    """What the process says first: where it listens, or why not."""

    endpoint: wire.Endpoint | None = None
    error: WireError | None = None


def main() -> int:
    """Serve one stage; the exit code."""
    stdin = os.fdopen(0, "rb", buffering=0, closefd=False)
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not be taken for the answer
    config = wire.read_config(stdin)
    threading.Thread(target=_watch_lifeline, name="lifeline", daemon=True).start()
    try:
        stage = Stage.load(
            config.path,
            config.start,
            config.end,
            store=SliceStore(config.slices or None),
            model_params=config.model_params,
            **config.context_params,
        )
        server = StageServer(stage, config)
    except LlamaherdError as error:
        _say(answer, Started(error=pack_error(error)))
        return 1
    except Exception as error:
        traceback.print_exc()
        _say(answer, Started(error=pack_error(LlamaherdError(f"the stage cannot start: {error!r}"))))
        return 1
    _say(answer, Started(server.endpoint))
    server.run()
    return 0


def _say(answer: object, started: Started) -> None:
    with answer:  # type: ignore[attr-defined]
        answer.write(msgspec.json.encode(started) + b"\n")  # type: ignore[attr-defined]


def _watch_lifeline() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # without the interpreter's finalisation: threads may still be inside libllama
