"""libllama's quantiser, in a process of its own: it can be interrupted, and an abort kills only that.

Run as a script this module is that process; `quantize` starts it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from ..errors import InvalidParameterError, NativeError
from ..files.imatrix import read_imatrix

__all__ = ["quantize"]

_UNKNOWN_TYPE, _FAILED = 3, 4


def quantize(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    type: str,
    *,
    imatrix: str | os.PathLike[str] | None = None,
    n_threads: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Quantise the GGUF at ``source`` into ``target`` with ``llama_model_quantize``.

    type: a name such as "q8_0", "q4_k_m", "iq4_xs". imatrix: a file of llama.cpp's imatrix tool, needed for
    the smallest types. n_threads: 0 means all. progress: called about five times a second as (bytes
    written, bytes of the source). Already quantised weights are requantised.

    Raises InvalidParameterError for an unknown type, FileError for the imatrix, NativeError if libllama
    fails or aborts. Interrupting stops the process; ``target`` may then be there in part.
    """
    request = {
        "source": os.fspath(source),
        "target": os.fspath(target),
        "type": type.lower(),
        "imatrix": None if imatrix is None else os.fspath(imatrix),
        "n_threads": n_threads,
    }
    if imatrix is not None:
        read_imatrix(imatrix)  # its faults are told here, as the errors they are
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, json.dumps(request)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    watcher = _Watcher(Path(target), Path(source), progress)
    try:
        with watcher:
            out = process.communicate()[0].decode("utf-8", "replace")
    except BaseException:
        process.kill()
        process.wait()
        raise
    if process.returncode == _UNKNOWN_TYPE:
        raise InvalidParameterError("type", type, out.strip())
    if process.returncode:
        why = "libllama failed" if process.returncode == _FAILED else "libllama aborted"
        raise NativeError(f"{why} while quantising {source} to {type}", out[-2000:])


class _Watcher:
    """Reports how far the target has grown, for libllama does not."""

    def __init__(self, target: Path, source: Path, progress: Callable[[int, int], None] | None) -> None:
        self._target, self._total, self._progress = target, source.stat().st_size, progress
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        assert self._progress is not None
        while not self._done.wait(0.2):
            if self._target.exists():
                self._progress(min(self._target.stat().st_size, self._total), self._total)

    def __enter__(self) -> None:
        if self._progress is not None:
            self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._done.set()
        if self._progress is not None:
            self._thread.join()


# ------------------------------------------------------------------------------------- the process


def _main() -> int:
    from ..native.quantize import quantize_file  # loads libllama, in this process only

    request = json.loads(sys.argv[1])
    path = request["imatrix"]
    try:
        quantize_file(
            request["source"],
            request["target"],
            request["type"],
            imatrix=None if path is None else read_imatrix(path),
            n_threads=request["n_threads"],
        )
    except InvalidParameterError as error:
        print(error.limit)
        return _UNKNOWN_TYPE
    except NativeError as error:
        print(error.log)
        return _FAILED
    return 0


if __name__ == "__main__":
    sys.exit(_main())
