"""The command line as a process of its own, with and without a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "llamaherd"]

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment for a process: this tree's llamaherd, a home of its own."""
    found = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMAHERD_", "COV_"))}
    home = tmp_path_factory.mktemp("home")
    return found | {
        "PYTHONPATH": str(ROOT / "src"),
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "PYTHONUTF8": "1",
        "TERM": "xterm",
        "COLUMNS": "110",
    }


@pytest.fixture(scope="session")
def llamaherd(environment: dict[str, str]) -> Run:
    """Run llamaherd to its end."""

    def run(*arguments: object, input: str = "", **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *map(str, arguments)],
            input=input,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=240,
            env=environment | extra,
        )

    return run
