"""llama.cpp's engine under Python's tools.

    from llamaherd import Model, Herd

    with Model.load("model.gguf") as model, Herd(model, n_ctx=4096, max_sequences=16) as herd:
        for suggestion in herd.suggest("Once upon a time", n=8):
            print(suggestion.text, suggestion.score)

Importing this package loads nothing heavy: libllama is loaded with the first use of Model or Herd.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import LoraConfig, SamplingConfig, SchedulerConfig
from .errors import LlamaherdError
from .types import (
    Completion,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    Logprob,
    PromptPart,
    Suggestion,
    Timings,
    Token,
    Usage,
)

if TYPE_CHECKING:
    from .engine.context import Context
    from .engine.model import Model
    from .herd import Herd
    from .scheduler.handle import Handle

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "Context",
    "Event",
    "Failed",
    "Finished",
    "GenerationRequest",
    "Handle",
    "Herd",
    "LlamaherdError",
    "Logprob",
    "LoraConfig",
    "Model",
    "PromptPart",
    "SamplingConfig",
    "SchedulerConfig",
    "Suggestion",
    "Timings",
    "Token",
    "Usage",
]

_LAZY = {
    "Context": ".engine.context",
    "Handle": ".scheduler.handle",
    "Herd": ".herd",
    "Model": ".engine.model",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
