"""Idle KV states on disk, so that a restarted worker answers a known prefix without prefill.

One file a sequence, named by a digest of its tokens; the least recently used ones go when the folder grows
over its size. Files are checked (model, KV type, checksum) before llama.cpp sees them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..engine import state
from ..errors import CapacityError, StateMismatchError

__all__ = ["KVStore"]

_SUFFIX = ".kv"
_SHORTEST = 32  # tokens; shorter prefixes are computed as fast as they are read


class SavesSequences(Protocol):
    """What the store needs of an engine."""

    def save_sequence_file(self, sequence: int, path: Path, tokens: Sequence[int] = ()) -> None:
        """Write a sequence's state, and its tokens, to a file."""

    def restore_sequence(self, data: bytes) -> int:
        """A new sequence with a saved state."""


class HoldsIdle(Protocol):
    """What the store needs of a scheduler."""

    def idle(self) -> list[tuple[int, NDArray[np.int32]]]:
        """Idle sequences and their tokens, least recently used first."""

    def adopt(self, sequence: int, tokens: NDArray[np.int32]) -> None:
        """Take in a sequence that holds these tokens as an idle one."""


class KVStore:
    """The folder.

    Args:
        folder: made if it is not there, for its owner only.
        limit: bytes that the files may take together.
        engine, scheduler: whose sequences are kept. All calls come from the thread that steps them.
    """

    def __init__(self, folder: Path, limit: int, engine: SavesSequences, scheduler: HoldsIdle) -> None:
        self._folder = folder
        self._limit = limit
        self._engine = engine
        self._scheduler = scheduler
        self._written: dict[str, None] = {}  # names, so that nothing is written twice
        self.restored_tokens = 0
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._restore_all()

    def _restore_all(self) -> None:
        """Take in the most recent files while there is room; the last one used goes in last."""
        adopted: list[tuple[int, NDArray[np.int32]]] = []
        for path in self._files()[::-1]:
            try:
                data = state.read(path)
                tokens = np.asarray(state.saved_tokens(data), np.int32)
                sequence = self._engine.restore_sequence(data)
            except StateMismatchError:
                continue  # of another model, which may share the folder, or damaged: it ages out
            except CapacityError:
                break
            adopted.append((sequence, tokens))
            self._written[path.name] = None
            self.restored_tokens += len(tokens)
        for sequence, tokens in reversed(adopted):
            self._scheduler.adopt(sequence, tokens)

    def save_some(self) -> bool:
        """Write one idle sequence that is not on disk yet; whether there was one."""
        for sequence, tokens in reversed(self._scheduler.idle()):
            name = _name(tokens)
            if len(tokens) < _SHORTEST or name in self._written:
                continue
            self._save(sequence, tokens, name)
            return True
        return False

    def save_idle(self) -> None:
        """Write all idle sequences, the most recently used ones last."""
        for sequence, tokens in self._scheduler.idle():
            name = _name(tokens)
            if len(tokens) < _SHORTEST:
                continue
            if name in self._written:
                with contextlib.suppress(OSError):
                    os.utime(self._folder / name)
            else:
                self._save(sequence, tokens, name)

    def _save(self, sequence: int, tokens: NDArray[np.int32], name: str) -> None:
        self._written[name] = None
        if len(self._written) > 10_000:
            self._written.pop(next(iter(self._written)))
        try:
            self._engine.save_sequence_file(sequence, self._folder / name, tokens.tolist())
        except OSError:
            return  # a full disk costs the cache, not the service
        self._shrink()

    def _shrink(self) -> None:
        files = self._files()
        sizes = {path: _size(path) for path in files}
        total = sum(sizes.values())
        for path in files:
            if total <= self._limit:
                return
            total -= sizes[path]
            path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        """Least recently used first."""
        found = [p for p in self._folder.iterdir() if p.suffix == _SUFFIX]
        return sorted(found, key=lambda p: (_mtime(p), p.name))


def _name(tokens: NDArray[np.int32]) -> str:
    return hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest()[:40] + _SUFFIX


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _mtime(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0
