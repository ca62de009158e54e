"""A worker's process as its parent sees it: started, watched, ended, and what is known of its end."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import signal
import subprocess
import sys
import threading
from pathlib import Path

from . import wire
from .client import Death
from .link import Link

__all__ = ["Child", "oom_kills"]

log = logging.getLogger(__name__)

_PROGRAM = (
    "import os, sys; sys.path[:] = sys.argv[1:]; from llamaherd.worker.process import main; os._exit(main())"
)


class Child:
    """A started worker process.

    Attributes:
        exited: its exit code, as subprocess gives it, once it has ended.
    """

    def __init__(self, config: wire.WorkerConfig, link: Link) -> None:
        self.link = link
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self._last_words: collections.deque[str] = collections.deque(maxlen=40)
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", _PROGRAM, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # the terminal's Ctrl-C is the server's to handle
        )
        self.pid = self._process.pid
        threading.Thread(target=self._wait, name=f"worker {self.pid}", daemon=True).start()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it died at once: exited tells
            wire.write_config(self._process.stdin, config, up=link.up, down=link.down)

    def _wait(self) -> None:
        """Read what it writes to its end, and then its exit code; in a thread of its own."""
        assert self._process.stderr is not None
        with contextlib.closing(self._process.stderr) as stderr:
            for line in stderr:
                text = line.decode("utf-8", "replace").rstrip()
                self._last_words.append(text)
                log.debug("worker %s: %s", self.pid, text)
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._set_exited, code)

    def _set_exited(self, code: int) -> None:
        if not self.exited.done():
            self.exited.set_result(code)

    async def kill(self) -> None:
        """End it if it has not ended, and wait for that."""
        if not self.exited.done():
            self._process.kill()
            await asyncio.shield(self.exited)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def death(self, out_of_memory: bool) -> Death:
        """How it ended. Only SIGKILL and SIGTERM from outside are nobody's fault in here."""
        code = self.exited.result()
        if code >= 0:
            return Death(f"exited with code {code}{self._words()}", blames=code != 0)
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        if -code == signal.SIGKILL and out_of_memory:
            return Death("was killed by the kernel for lack of memory (SIGKILL)", blames=True)
        if -code in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            return Death(f"was killed from outside ({name})", blames=False)
        return Death(f"crashed ({name}){self._words()}", blames=True)

    def _words(self) -> str:
        """The line among its last ones that most likely says why."""
        lines = [line for line in self._last_words if line.strip()]
        telling = [s for s in lines if "ASSERT" in s or "Error" in s or "error" in s or "terminate" in s]
        chosen = telling[-1:] or lines[-1:]
        return f": {chosen[0][:500]}" if chosen else ""


def oom_kills() -> int:
    """How often the kernel has killed for lack of memory, in this control group and on this machine."""
    total = 0
    for path in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        with contextlib.suppress(OSError, ValueError):
            for line in Path(path).read_text().splitlines():
                if line.startswith("oom_kill "):
                    total += int(line.split()[1])
    return total
