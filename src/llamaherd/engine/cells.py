"""Who uses which cells of the KV cache: bookkeeping that llama.cpp keeps to itself."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["CellLedger"]


class CellLedger:
    """Counts the cells that sequences use, with forks sharing theirs (unified) or copying (split).

    Cells here are numbers of our own, not llama.cpp's: only how many are used matters.
    """

    def __init__(self, n_cells: int, *, unified: bool) -> None:
        self.n_cells = n_cells
        self.unified = unified
        self._users = np.zeros(n_cells, np.int32)
        self._free = np.arange(n_cells, dtype=np.int32)  # a stack: the first ``free`` entries
        self.free = n_cells
        self._cells: dict[int, NDArray[np.int32]] = {}
        self._lengths: dict[int, int] = {}

    def open(self, sequence: int) -> None:
        """Begin an empty sequence."""
        self._cells[sequence] = np.empty(16, np.int32)
        self._lengths[sequence] = 0

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self._lengths[sequence]

    def own(self, sequence: int) -> int:
        """Cells that no other sequence uses."""
        return int((self._users[self._view(sequence)] == 1).sum())

    def shared(self, sequence: int) -> bool:
        """Whether any of its cells is another sequence's too."""
        return self.own(sequence) < self._lengths[sequence]

    def append(self, sequence: int, n: int) -> None:
        """Give a sequence n more cells; the caller has checked ``free``."""
        taken = self._free[self.free - n : self.free]
        self._extend(sequence, taken)
        self._users[taken] = 1
        self.free -= n

    def fork(self, source: int, target: int, length: int) -> None:
        """Begin ``target`` with the first ``length`` cells of ``source``, or with copies of them."""
        self.open(target)
        if self.unified:
            cells = self._view(source)[:length]
            self._extend(target, cells)
            self._users[cells] += 1
        else:
            self.append(target, length)

    def trim(self, sequence: int, length: int) -> None:
        """Keep the first ``length`` cells."""
        self._return(self._view(sequence)[length:])
        self._lengths[sequence] = length

    def cut(self, sequence: int, start: int, end: int) -> None:
        """Take out cells [start, end) and close the gap."""
        cells = self._view(sequence)
        self._return(cells[start:end])
        rest = cells[end:].copy()
        cells[start : start + len(rest)] = rest
        self._lengths[sequence] -= end - start

    def close(self, sequence: int) -> None:
        """End a sequence."""
        self._return(self._view(sequence))
        del self._cells[sequence], self._lengths[sequence]

    def unshare(self, sequence: int) -> None:
        """Give a sequence cells of its own in place of shared ones."""
        n = self._lengths[sequence]
        self._return(self._view(sequence))
        self._lengths[sequence] = 0
        self.append(sequence, n)

    def _view(self, sequence: int) -> NDArray[np.int32]:
        return self._cells[sequence][: self._lengths[sequence]]

    def _extend(self, sequence: int, cells: NDArray[np.int32]) -> None:
        length = self._lengths[sequence]
        buffer = self._cells[sequence]
        if length + len(cells) > len(buffer):
            grown = np.empty(max(2 * len(buffer), length + len(cells)), np.int32)
            grown[:length] = buffer[:length]
            buffer = self._cells[sequence] = grown
        buffer[length : length + len(cells)] = cells
        self._lengths[sequence] = length + len(cells)

    def _return(self, cells: NDArray[np.int32]) -> None:
        self._users[cells] -= 1
        gone = cells[self._users[cells] == 0]
        self._free[self.free : self.free + len(gone)] = gone
        self.free += len(gone)
