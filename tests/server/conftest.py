"""Real servers: `llamaherd serve` in a process of its own, with the real demo model."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest


class Server:
    """A running server process."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process = process
        self.url = url
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with contextlib.closing(self.process.stderr) as stderr:
            self.log += (line.decode("utf-8", "replace") for line in stderr)

    @property
    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def kill_worker(self, sig: int = signal.SIGKILL) -> None:
        for worker in self.workers:
            worker.send_signal(sig)

    def new_worker(self) -> None:
        """Kill the worker, so that the next one begins with an empty cache."""
        restarts = self.status()["restarts"]
        self.kill_worker()
        wait_for(lambda: self.status()["restarts"] > restarts and self.status()["ready"], 60)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, **options)

    def status(self) -> dict[str, Any]:
        with self.client() as client:
            status: dict[str, Any] = client.get("/status").json()["models"][0]
        return status

    def wait_idle(self, seconds: float = 10) -> None:
        wait_for(lambda: self.status()["running"] == 0 and self.status()["open_requests"] == 0, seconds)

    def stop(self, seconds: float = 20) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self._reader.join()


def wait_for(condition: Any, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("it did not come to that in time")
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(*options: str, ready: bool = True, env: dict[str, str] | None = None) -> Iterator[Server]:
    """`llamaherd serve` on a free port."""
    port = free_port()
    command = [sys.executable, "-m", "llamaherd", "serve", "--port", str(port), "--threads", "1", *options]
    source = str(Path(__file__).parents[2] / "src")
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": f"{source}{os.pathsep}{root}"} | (env or {})
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)
    server = Server(process, f"http://127.0.0.1:{port}")
    try:
        if ready:
            wait_for(lambda: _healthy(server), 60)
        yield server
    finally:
        server.stop()


def _healthy(server: Server) -> bool:
    if server.process.poll() is not None:
        raise AssertionError("the server ended:\n" + "".join(server.log))
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{server.url}/health").status_code == 200
    return False


@pytest.fixture(scope="session")
def server(demo_model_path: Path) -> Iterator[Server]:
    """One server for all tests that leave it as they found it."""
    with serving(
        "--max-sequences", "16", "--max-queue", "64", "--n-ctx", "4096", "--lean-preset", ""
    ) as running:
        yield running
