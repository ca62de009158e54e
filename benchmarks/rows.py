"""Measured rows as lines of JSON, each with the machine that it was measured on."""

from __future__ import annotations

import datetime
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np


class Rows:
    """Appends to a file; without one it keeps nothing."""

    def __init__(self, path: Path | None, **facts: Any) -> None:
        self._path, self._facts = path, facts

    def add(self, **row: Any) -> None:
        if self._path is None:
            return
        time = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**self._facts, **row, "time": time, "machine": machine()}) + "\n")


@functools.cache
def machine() -> dict[str, Any]:
    """What `llamaherd info` says, and the versions of what it does not name."""
    command = [sys.executable, "-m", "llamaherd", "info", "--json"]
    # a process of its own: it loads llama.cpp, which measurements want to do their own way
    facts = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    facts.pop("demo model", None)  # where it lies on this disk
    try:
        import llamaherd_kernels

        facts["llamaherd-kernels"] = llamaherd_kernels.__version__
    except ImportError:
        facts["llamaherd-kernels"] = None
    return {**facts, "numpy": np.__version__, "cpus": os.cpu_count()}
