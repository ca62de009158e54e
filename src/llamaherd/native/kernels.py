"""Switch llamaherd-kernels on: a plug-in with faster products and attention for unmodified llama.cpp
(``llamaherd[fast]``).

``LLAMAHERD_KERNELS`` says what is wanted: ``on`` (the default: use it where it is installed and its self-test
passes, stock llama.cpp otherwise), ``off``, or ``require`` (stock is an error).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import os

from ..errors import LibraryError
from .amx import without_amx

__all__ = ["KernelStatus", "enable_kernels"]

LOGGER = logging.getLogger("llamaherd.kernels")
_VARIABLE = "LLAMAHERD_KERNELS"
_MODES = ("on", "off", "require")


@dataclasses.dataclass(frozen=True)
class KernelStatus:
    """What computes the products of weights, and attention.

    Attributes:
        active: the plug-in does, products for the types in ``types``; else stock llama.cpp.
        level: instruction set of the plug-in's kernels, or "".
        types: ggml types that it takes.
        reason: why stock llama.cpp computes, or what else there is to say.
        attention: the plug-in computes attention.
    """

    active: bool
    level: str = ""
    types: tuple[str, ...] = ()
    reason: str = ""
    attention: bool = False

    def __str__(self) -> str:
        if not self.active:
            return f"stock llama.cpp ({self.reason})"
        note = f" ({self.reason})" if self.reason else ""
        what = [*self.types, *(["attention"] if self.attention else [])]
        return f"{self.level}: {', '.join(what)}{note}"


@functools.cache
def enable_kernels() -> KernelStatus:
    """Have llama.cpp use the plug-in if that is wanted and possible; once, before a model is loaded.

    Raises:
        LibraryError: ``LLAMAHERD_KERNELS`` is no known word, or ``require`` and the plug-in cannot be used.
    """
    mode = os.environ.get(_VARIABLE, "on").lower() or "on"
    if mode not in _MODES:
        raise LibraryError(f"{_VARIABLE}={mode}: there are {', '.join(_MODES)}")
    with without_amx():
        status = KernelStatus(False, reason=f"{_VARIABLE}=off") if mode == "off" else _enable()
    if status.active:
        LOGGER.info("llama.cpp uses kernels of level %s", status)
    elif mode == "require":
        raise LibraryError(f"{_VARIABLE}=require, but llamaherd-kernels cannot be used: {status.reason}")
    else:
        LOGGER.info("%s", status)
    return status


def _enable() -> KernelStatus:
    try:
        plugin = importlib.import_module("llamaherd_kernels")
    except ImportError:
        return KernelStatus(False, reason="llamaherd-kernels is not installed: pip install 'llamaherd[fast]'")
    found = plugin.enable()
    return KernelStatus(found.active, found.level, tuple(found.types), found.reason, found.attention)
