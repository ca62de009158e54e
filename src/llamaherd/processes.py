"""What the system says of a process."""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["was_stopped"]


def was_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal (state T)."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    return False
