"""What goes to the terminal: model text made safe for it, numbers made readable."""

from __future__ import annotations

import re
import sys

from ..types import Timings, Usage

__all__ = ["note", "printable", "rates", "write"]

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Text without control characters but newlines and tabs: a model cannot drive the terminal."""
    return _CONTROLS.sub("\ufffd", text)


def write(text: str) -> None:
    """Text of a model to standard output at once; as it is where that is no terminal."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(text: str) -> None:
    """A remark beside the output, on standard error."""
    print(text, file=sys.stderr, flush=True)


def rates(usage: Usage, timings: Timings, prefilled: int | None = None) -> str:
    """``prefill 210 tokens in 0.42 s (500/s), decode 56 tokens in 0.51 s (110/s)``."""
    fresh = usage.prompt_tokens - usage.cached_tokens if prefilled is None else prefilled
    cached = f" ({usage.cached_tokens} more cached)" if usage.cached_tokens else ""
    return (
        f"prefill {_rate(fresh, timings.prefill)}{cached}, "
        f"decode {_rate(usage.completion_tokens, timings.decode)}"
    )


def _rate(tokens: int, seconds: float) -> str:
    speed = f" ({tokens / seconds:.0f} tokens/s)" if seconds > 0 and tokens else ""
    return f"{tokens} token{'' if tokens == 1 else 's'} in {seconds:.2f} s{speed}"
