"""Sequences that are handed out, forked, trimmed and taken back: ids and numbers of cells."""

from __future__ import annotations

import heapq
from typing import Any

from ..errors import OutOfCellsError, OutOfSequencesError, PositionError, SequenceError
from .cells import CellLedger

__all__ = ["SequenceTable"]


class SequenceTable:
    """Who has which sequence and how many cells; what holds the cells follows in the ``_on_`` methods.

    A unified cache shares the cells of forks; a split one gives each sequence a part of its own and forks
    by copying. The lowest free id is handed out first: a split cache decodes neighbouring ids together.
    """

    def __init__(self, lock: Any, *, n_sequences: int, n_cells: int, unified: bool, can_trim: bool) -> None:
        self._lock = lock
        self.n_sequences = n_sequences
        self.n_cells = n_cells
        self.can_trim = can_trim
        self.unified = unified
        self._free = list(range(n_sequences))
        self._ledger = CellLedger(n_cells, unified=unified)
        self._live: set[int] = set()

    def _check_open(self) -> None:
        """Raise ClosedError if there are no cells any more."""

    def _on_allocate(self, sequence: int) -> None:
        """An empty sequence was handed out."""

    def _on_release(self, sequence: int) -> None:
        """A sequence is about to be taken back."""

    def _on_fork(self, source: int, target: int, length: int, have: int) -> None:
        """``target`` was made the first ``length`` of the ``have`` tokens of ``source``."""

    def _on_trim(self, sequence: int, length: int) -> None:
        """A sequence is about to lose what lies behind its first ``length`` tokens."""

    @property
    def free_cells(self) -> int:
        """Tokens that still fit, all sequences together."""
        return self._ledger.free

    @property
    def used_cells(self) -> int:
        """Tokens in the cache; those that forks share count once."""
        return self.n_cells - self._ledger.free

    @property
    def free_sequences(self) -> int:
        """Sequence ids that are not handed out."""
        return len(self._free)

    @property
    def live(self) -> frozenset[int]:
        """The sequence ids in use."""
        return frozenset(self._live)

    def check(self, sequence: int) -> None:
        """Refuse an id that is not in use. Raises SequenceError."""
        if type(sequence) is not int:
            raise SequenceError(sequence, "ids are ints, as allocate() gives them")
        if sequence not in self._live:
            if not 0 <= sequence < self.n_sequences:
                raise SequenceError(sequence, f"ids are in [0, {self.n_sequences}) (n_seq_max)")
            raise SequenceError(sequence, "it is not in use; allocate() hands ids out")

    def length(self, sequence: int) -> int:
        """Tokens that the sequence holds; its next position. Raises SequenceError."""
        self.check(sequence)
        return self._ledger.length(sequence)

    def own_cells(self, sequence: int) -> int:
        """Cells that only this sequence uses: what releasing it would free. Raises SequenceError."""
        self.check(sequence)
        return self._ledger.own(sequence)

    def allocate(self, sequence: int | None = None) -> int:
        """An empty sequence's id: the lowest free one, or ``sequence``, which must be free.

        Raises OutOfSequencesError, SequenceError.
        """
        with self._lock:
            sequence = self._take(sequence)
            self._ledger.open(sequence)
            self._on_allocate(sequence)
            return sequence

    def _take(self, sequence: int | None) -> int:
        self._check_open()
        if not self._free:
            raise OutOfSequencesError(1, 0, self.n_sequences)
        if sequence is None:
            sequence = heapq.heappop(self._free)
        elif sequence in self._free:
            self._free.remove(sequence)
            heapq.heapify(self._free)
        else:
            raise SequenceError(sequence, f"it is in use, or not in [0, {self.n_sequences}) (n_seq_max)")
        self._live.add(sequence)
        return sequence

    def release(self, sequence: int) -> None:
        """Take a sequence id back and drop its tokens. Raises SequenceError."""
        with self._lock:
            self.check(sequence)
            self._on_release(sequence)
            self._ledger.close(sequence)
            self._live.discard(sequence)
            heapq.heappush(self._free, sequence)

    def fork(self, sequence: int, length: int | None = None, target: int | None = None) -> int:
        """A new sequence that begins as the first ``length`` tokens of another (all, if None).

        Its id is the lowest free one, or ``target``, which must be free.

        Raises:
            SequenceError, PositionError: no such sequence; more tokens than it has, or part of a
                recurrent state.
            OutOfSequencesError, OutOfCellsError: no id; no room for a copy (split cache).
        """
        with self._lock:
            have = self.length(sequence)
            n = have if length is None else length
            self._check_length(sequence, n, have)
            if not self.unified and n > self._ledger.free:
                raise OutOfCellsError(n, self.used_cells, self.n_cells)
            target = self._take(target)
            self._ledger.fork(sequence, target, n)
            self._on_fork(sequence, target, n, have)
            return target

    def trim(self, sequence: int, length: int) -> None:
        """Keep only the first ``length`` tokens.

        Raises:
            SequenceError, PositionError: no such sequence; more tokens than it has, or part of a
                recurrent state.
        """
        with self._lock:
            have = self.length(sequence)
            self._check_length(sequence, length, have)
            if length < have:
                self._on_trim(sequence, length)
                self._ledger.trim(sequence, length)

    def _check_length(self, sequence: int, length: int, have: int) -> None:
        if type(length) is not int or not 0 <= length <= have:
            raise PositionError(length, f"the sequence holds {have} tokens", sequence)
        if not self.can_trim and 0 < length < have:
            raise PositionError(
                length,
                "this model's state (recurrent, or a sliding window without swa_full) cannot be cut; fork it "
                "before going on, or start again",
                sequence,
            )

    def clear(self) -> None:
        """Take all sequences back."""
        with self._lock:
            for sequence in sorted(self._live):
                self.release(sequence)

    def appended(self, sequence: int, n: int) -> None:
        """Note n tokens that a decode has put at the sequence's end."""
        self._ledger.append(sequence, n)
