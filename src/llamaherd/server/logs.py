"""Structured logs: one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
import time

__all__ = ["configure"]

_EXTRAS = ("request_id", "client", "seconds")


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """A record as one line of JSON."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in _EXTRAS:
            if hasattr(record, name):
                line[name] = getattr(record, name)
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(level: str, *, structured: bool) -> None:
    """Log to standard error: JSON lines, or lines to read."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
    handler.setFormatter(_JsonLines() if structured else plain)
    root = logging.getLogger("llamaherd")
    root.handlers = [handler]
    root.propagate = False
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error"):
        other = logging.getLogger(name)
        other.handlers = [handler]
        other.propagate = False
        other.setLevel(logging.WARNING)
