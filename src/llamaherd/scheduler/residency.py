"""Where tokens live: sequences in use, and idle ones kept for prompts that begin alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..engine.protocol import SequenceMemory
from ..errors import ClosedError
from .prefix_cache import PrefixCache, best_match

__all__ = ["Residency"]

Tokens = NDArray[np.int32]
Kept: TypeAlias = tuple[int, int]
"""An idle sequence and the number of its keeping."""


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
            self._drop(oldest)
        return True

    def retire(self, sequence: int, tokens: Tokens, *, keep: bool = True) -> Kept | None:
        """Take a sequence that holds ``tokens`` out of use; ``keep`` it idle as long as there is room."""
        if not (keep and len(tokens)):
            self._release(sequence)
            return None
        for covered in self.cache.covered_by(tokens):
            self._drop(covered)
        return sequence, self.cache.put(sequence, tokens)

    def settle(self, kept: Iterable[Kept]) -> None:
        """Of one request's idle sequences leave one, or none where no prefix cache is wanted.

        All hold the prompt, and beyond it little that is of use again. They are not released one by one
        as they finish: llama.cpp would put later tokens of their siblings into the gaps, and its sums over
        the cells, hence its rounding, would depend on the order of endings.
        """
        there = [sequence for sequence, keeping in kept if self.cache.holds(sequence, keeping)]
        for sequence in there[1 if self._keep else 0 :]:
            self._drop(sequence)

    def _drop(self, sequence: int) -> None:
        self.cache.take(sequence)
        self._release(sequence)

    def _release(self, sequence: int) -> None:
        with contextlib.suppress(ClosedError):  # an engine that was closed has nothing to take back
            self._memory.release(sequence)

    def idle(self) -> list[tuple[int, Tokens]]:
        """Idle sequences and their tokens, least recently used first."""
        return self.cache.by_age()

    def adopt(self, sequence: int, tokens: Tokens) -> None:
        """Take in a sequence that somebody else has made, as an idle one."""
        self.retire(sequence, tokens)

    def clear(self) -> None:
        """Release every idle sequence."""
        for sequence, _ in self.cache.holders():
            self._drop(sequence)
