"""Where tokens live: sequences in use, and idle ones kept for prompts that begin alike."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ..engine.protocol import SequenceMemory
from .prefix_cache import PrefixCache, best_match

__all__ = ["Residency"]

Tokens = NDArray[np.int32]


class Residency:
    """Hands out sequences that already hold as much of the wanted tokens as can be found."""

    def __init__(self, memory: SequenceMemory, *, keep: bool) -> None:
        self._memory = memory
        self._keep = keep
        self.cache = PrefixCache()

    def place(self, tokens: Tokens, live: Iterable[tuple[int, Tokens]]) -> tuple[int, int] | None:
        """A sequence that holds a beginning of ``tokens``, and its length; None if no id is free.

        ``live`` are sequences in use and what they hold. An idle sequence that is a beginning of the
        tokens is taken over; otherwise the best one is forked.
        """
        holders = [*self.cache.holders(), *live]
        match = best_match(tokens, holders, whole=not self._memory.can_trim)
        if match is not None and match.sequence in self.cache:
            if match.length == self._memory.length(match.sequence):
                self.cache.take(match.sequence)
                return match.sequence, match.length
            self.cache.touch(match.sequence)
        if not self.make_room(sequences=1, but=match.sequence if match else None):
            return None
        if match is None:
            return self._memory.allocate(), 0
        if not self._room_for_copy(match.length, match.sequence):
            return self._memory.allocate(), 0
        return self._memory.fork(match.sequence, match.length), match.length

    def _room_for_copy(self, length: int, but: int) -> bool:
        """Forks of a split cache are copies; those of a unified one take no cells."""
        return self._memory.unified or self.make_room(cells=length, but=but)

    def make_room(self, *, cells: int = 0, sequences: int = 0, but: int | None = None) -> bool:
        """Evict idle sequences, least recently used first, until that much is free; whether it is."""
        memory = self._memory
        while memory.free_cells < cells or memory.free_sequences < sequences:
            oldest = self.cache.oldest(but)
            if oldest is None:
                return False
            self.cache.take(oldest)
            memory.release(oldest)
        return True

    def retire(self, sequence: int, tokens: Tokens, *, keep: bool = True) -> None:
        """Take a sequence that holds ``tokens`` out of use, and keep it idle if it may be of use again."""
        if not (self._keep and keep and len(tokens)):
            self._memory.release(sequence)
            return
        for covered in self.cache.covered_by(tokens):
            self.cache.take(covered)
            self._memory.release(covered)
        self.cache.put(sequence, tokens)

    def idle(self) -> list[tuple[int, Tokens]]:
        """Idle sequences and their tokens, least recently used first."""
        return self.cache.by_age()

    def adopt(self, sequence: int, tokens: Tokens) -> None:
        """Take in a sequence that somebody else has made, as an idle one."""
        self.retire(sequence, tokens)

    def clear(self) -> None:
        """Release every idle sequence."""
        for sequence, _ in self.cache.holders():
            self.cache.take(sequence)
            self._memory.release(sequence)
