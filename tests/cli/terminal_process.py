"""llamaherd in a terminal (a pty), as a user sees it."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from typing import Any

_PROGRESS = re.compile(r"\r(loading \d+ %|\x1b\[K)")


class TerminalProcess:
    """A process whose standard streams are a terminal of its own."""

    def __init__(self, arguments: Sequence[object], environment: dict[str, str]) -> None:
        self._master, self._slave = pty.openpty()  # the slave stays open: the terminal outlives the process
        self.settings = termios.tcgetattr(self._slave)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llamaherd", *map(str, arguments)],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env=environment,
            start_new_session=True,
        )
        self.seen = ""

    def wait_for(self, text: str, timeout: float = 120) -> None:
        """Read until the text has appeared since the last wait."""
        deadline = time.monotonic() + timeout
        while text not in self.seen:
            self._read(deadline - time.monotonic())
            assert time.monotonic() < deadline, f"{text!r} did not appear in {self.seen!r}"
        self.seen = self.seen.split(text, 1)[1]

    def wait_for_more(self, characters: int, timeout: float = 120) -> None:
        """Read until that many more characters have appeared."""
        deadline = time.monotonic() + timeout
        while len(self.seen) < characters:
            self._read(deadline - time.monotonic())
            assert time.monotonic() < deadline, f"only {self.seen!r} appeared"

    def _read(self, timeout: float) -> None:
        ready, _, _ = select.select([self._master], [], [], max(0.0, min(timeout, 0.5)))
        if ready:
            data = os.read(self._master, 4096)
            if b"\x1b[6n" in data:  # "where is the cursor?"
                os.write(self._master, b"\x1b[1;1R")
            self.seen = _PROGRESS.sub("", self.seen + data.decode("utf-8", "replace"))

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self, timeout: float = 60) -> int:
        """Wait for the process's end, reading what it still says; its exit code."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            self._read(0.1)
            assert time.monotonic() < deadline, f"it does not end; last: {self.seen[-500:]!r}"
        while select.select([self._master], [], [], 0)[0]:
            self._read(0)
        return self.process.returncode

    def settings_now(self) -> list[Any]:
        return termios.tcgetattr(self._slave)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)
        os.close(self._slave)
