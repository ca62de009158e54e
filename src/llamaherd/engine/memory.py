"""The KV cache as sequences that are handed out, forked, trimmed, shifted and taken back."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from ..errors import OutOfCellsError, OutOfSequencesError, PositionError, SequenceError, UnsupportedError
from ..native import context as native
from ..native.handles import Handle
from .cells import CellLedger

__all__ = ["Memory"]


class Memory:
    """Sequence ids and cells of one context. Every call is serialised with the context's decodes.

    A unified cache shares the cells of forks; a split one gives each sequence a part of its own and forks
    by copying. The lowest free id is handed out first: a split cache decodes neighbouring ids together.
    """

    def __init__(
        self,
        context: Handle,
        lock: Any,
        *,
        n_sequences: int,
        n_cells: int,
        unified: bool,
        can_trim: bool,
        settle: Callable[[int, int], None],
    ) -> None:
        self._context = context
        self._lock = lock
        self.n_sequences = n_sequences
        self.n_cells = n_cells
        self.can_trim = can_trim
        self.unified = unified
        self._free = list(range(n_sequences))
        self._ledger = CellLedger(n_cells, unified=unified)
        self._live: set[int] = set()
        self._settle = settle
        self._unsettled = False  # llama.cpp copies between streams and shifts when it next decodes

    @property
    def free_cells(self) -> int:
        """Tokens that still fit, all sequences together."""
        return self._ledger.free

    @property
    def used_cells(self) -> int:
        """Tokens in the cache; those that forks share count once."""
        return self.n_cells - self._ledger.free

    @property
    def can_shift(self) -> bool:
        """Whether shift() works on this model's cache."""
        return self.can_trim and native.memory_can_shift(self._context)

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

    def allocate(self) -> int:
        """An empty sequence's id. Raises OutOfSequencesError."""
        with self._lock:
            sequence = self._take()
            self._ledger.open(sequence)
            return sequence

    def _take(self) -> int:
        _ = self._context.pointer  # closed contexts hand nothing out
        if not self._free:
            raise OutOfSequencesError(1, 0, self.n_sequences)
        sequence = heapq.heappop(self._free)
        self._live.add(sequence)
        return sequence

    def release(self, sequence: int) -> None:
        """Take a sequence id back and drop its tokens. Raises SequenceError."""
        with self._lock:
            self.check(sequence)
            native.memory_remove(self._context, sequence, -1, -1)
            self._ledger.close(sequence)
            self._live.discard(sequence)
            heapq.heappush(self._free, sequence)

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence that begins as the first ``length`` tokens of another (all, if None).

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
            target = self._take()
            self._ledger.fork(sequence, target, n)
            if n and (self.unified and self.can_trim):
                native.memory_copy(self._context, sequence, target, 0, n)
            elif n:
                # across streams, and of recurrent states, only whole sequences can be copied
                native.memory_copy(self._context, sequence, target, -1, -1)
                self._unsettled = True
                if n < have:
                    native.memory_remove(self._context, target, n, -1)
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
                native.memory_remove(self._context, sequence, length, -1)
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

    def shift(self, sequence: int, keep: int, discard: int) -> None:
        """Drop ``discard`` tokens after the first ``keep`` and move the rest down (K-shift).

        The kept tokens act as attention sinks (Xiao et al. 2023). Cells that forks share are copied
        first: llama.cpp would move them in every sequence that shares them.

        Raises:
            SequenceError, PositionError: no such sequence or stretch.
            UnsupportedError: this model's cache cannot be shifted.
            OutOfCellsError: no room to copy shared cells.
        """
        with self._lock:
            have = self.length(sequence)
            for start, stretch in ((0, keep), (keep, discard)):
                self._check_stretch(sequence, start, stretch, have)
            if not self.can_shift:
                raise UnsupportedError("this model's KV cache cannot be shifted; start again")
            if not discard:
                return
            self._unshare(sequence, have)
            native.memory_remove(self._context, sequence, keep, keep + discard)
            native.memory_add(self._context, sequence, keep + discard, -1, -discard)
            self._ledger.cut(sequence, keep, keep + discard)
            self._unsettled = True

    @staticmethod
    def _check_stretch(sequence: int, start: int, length: int, have: int) -> None:
        if type(length) is not int or not 0 <= length <= have - start:
            raise PositionError(length, f"the sequence holds {have} tokens, {start} to be kept", sequence)

    def _unshare(self, sequence: int, have: int) -> None:
        if not self._ledger.shared(sequence):
            return
        if have > self._ledger.free:
            raise OutOfCellsError(have, self.used_cells, self.n_cells)
        self.settle(sequence)
        state = native.state_get(self._context, sequence)
        native.memory_remove(self._context, sequence, -1, -1)
        if not native.state_set(self._context, sequence, state):
            raise OutOfCellsError(have, self.used_cells, self.n_cells)
        self._ledger.unshare(sequence)

    def clear(self) -> None:
        """Take all sequences back."""
        with self._lock:
            for sequence in sorted(self._live):
                self.release(sequence)

    # for the context, which holds the lock

    def settle(self, sequence: int) -> None:
        """Before a state is read or written: have llama.cpp do what it has put off."""
        if not self._unsettled:
            return
        # an empty sequence takes back what the decode leaves behind; a recurrent state could not
        scratch = self.allocate() if self._free else None
        if scratch is not None:
            self._settle(scratch, 0)
            self.release(scratch)
        elif self.can_trim:
            self._settle(sequence, self._ledger.length(sequence))
        else:
            raise OutOfSequencesError(1, 0, self.n_sequences)
        self._unsettled = False

    def appended(self, sequence: int, n: int) -> None:
        """Note n tokens that a decode has put at the sequence's end."""
        self._ledger.append(sequence, n)
        self._unsettled = False

    def roll_back(self, sequence: int, length: int) -> None:
        """Take out of llama.cpp what a failed decode left behind ``length``."""
        _, last = native.memory_positions(self._context, sequence)
        if last < length:
            return
        if not (self.can_trim and native.memory_remove(self._context, sequence, length, -1)):
            # a state that moved on cannot go back: empty it, so that nothing wrong is continued
            native.memory_remove(self._context, sequence, -1, -1)
            self._ledger.trim(sequence, 0)
