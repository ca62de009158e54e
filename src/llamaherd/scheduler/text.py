"""Tokens to text as they come: whole characters only, and never part of a stop text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Delta", "TextStream"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What became certain: text to emit, and the stop text that was found, if one was."""

    text: str
    stop: str | None = None


class TextStream:
    """Joins the bytes of tokens into text.

    Bytes that begin a character are held back until it is whole; bytes that can never become one show as
    U+FFFD. Text that may begin a stop text is held back until it does or does not. The deltas joined equal
    ``b"".join(pieces).decode("utf-8", "replace")``, cut at the first stop text.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def push(self, piece: bytes, *, final: bool = False) -> Delta:
        """Add a token's bytes; ``final`` when no more follow, which lets go of all that is held."""
        self._held += self._decoder.decode(piece, final)
        found = self._find()
        if found is not None:
            start, stop = found
            text, self._held = self._held[:start], ""
            return Delta(text, stop)
        keep = 0 if final else self._possible_beginning()
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return Delta(text)

    def fork(self) -> TextStream:
        """An independent copy."""
        copy = TextStream(self._stop)
        copy._decoder.setstate(self._decoder.getstate())
        copy._held = self._held
        return copy

    def _find(self) -> tuple[int, str] | None:
        """The stop text that is complete first, wherever tokens end; of several the longest."""
        hits = [(self._held.find(s) + len(s), -len(s), s) for s in self._stop if s in self._held]
        if not hits:
            return None
        end, _, stop = min(hits)
        return end - len(stop), stop

    def _possible_beginning(self) -> int:
        """Length of the longest end of the held text that begins a stop text."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for n in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-n:]
            if any(s.startswith(end) for s in self._stop):
                return n
        return 0
