"""The KV cache as sequences that are handed out, forked, trimmed, shifted and taken back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import OutOfCellsError, OutOfSequencesError, PositionError, UnsupportedError
from ..native import context as native
from ..native.handles import Handle
from .sequences import SequenceTable

__all__ = ["Memory"]


class Memory(SequenceTable):
    """Sequence ids and cells of one context. Every call is serialised with the context's decodes."""

    def __init__(
        self, context: Handle, lock: Any, *, settle: Callable[[int, int], None], **sizes: Any
    ) -> None:
        super().__init__(lock, **sizes)
        self._context = context
        self._settle = settle
        self._unsettled = False  # llama.cpp copies between streams and shifts when it next decodes

    def _check_open(self) -> None:
        _ = self._context.pointer  # closed contexts hand nothing out

    def _on_release(self, sequence: int) -> None:
        native.memory_remove(self._context, sequence, -1, -1)

    def _on_fork(self, source: int, target: int, length: int, have: int) -> None:
        if length and (self.unified and self.can_trim):
            native.memory_copy(self._context, source, target, 0, length)
        elif length:
            # across streams, and of recurrent states, only whole sequences can be copied
            native.memory_copy(self._context, source, target, -1, -1)
            self._unsettled = True
            if length < have:
                native.memory_remove(self._context, target, length, -1)

    def _on_trim(self, sequence: int, length: int) -> None:
        native.memory_remove(self._context, sequence, length, -1)

    @property
    def can_shift(self) -> bool:
        """Whether shift() works on this model's cache."""
        return self.can_trim and native.memory_can_shift(self._context)

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
        super().appended(sequence, n)
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
