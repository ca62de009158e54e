"""Finished sequences kept for prompts that begin alike: pure bookkeeping, no engine."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["LogitsCache", "Match", "PrefixCache", "best_match", "common_prefix"]

Tokens = NDArray[np.int32]


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Length of the longest common prefix of two token arrays."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


@dataclass(frozen=True, slots=True)
class Match:
    """A sequence that begins as wanted: ``length`` tokens can be taken from it."""

    sequence: int
    length: int


def best_match(wanted: Tokens, holders: Iterable[tuple[int, Tokens]], *, whole: bool = False) -> Match | None:
    """The sequence that shares the longest prefix with ``wanted``.

    ``whole``: only sequences that are a prefix in full count (recurrent states cannot be cut).
    """
    best: Match | None = None
    for sequence, tokens in holders:
        n = common_prefix(wanted, tokens)
        if whole and n < len(tokens):
            continue
        if n and (best is None or n > best.length):
            best = Match(sequence, n)
    return best


@dataclass(slots=True)
class _Entry:
    tokens: Tokens
    used: int
    keeping: int


class PrefixCache:
    """Which idle sequences hold which tokens, and when each was last of use."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._entries

    def put(self, sequence: int, tokens: Sequence[int] | Tokens) -> int:
        """Keep an idle sequence that holds these tokens; a number that names this keeping."""
        self._clock += 1
        self._entries[sequence] = _Entry(np.asarray(tokens, np.int32), self._clock, self._clock)
        return self._clock

    def holds(self, sequence: int, keeping: int) -> bool:
        """Whether the sequence is still idle since that put()."""
        return sequence in self._entries and self._entries[sequence].keeping == keeping

    def take(self, sequence: int) -> None:
        """The sequence is in use again, or gone."""
        del self._entries[sequence]

    def touch(self, sequence: int) -> None:
        """The sequence was of use."""
        self._clock += 1
        self._entries[sequence].used = self._clock

    def holders(self) -> list[tuple[int, Tokens]]:
        """All sequences and their tokens."""
        return [(sequence, entry.tokens) for sequence, entry in self._entries.items()]

    def by_age(self) -> list[tuple[int, Tokens]]:
        """All sequences and their tokens, least recently used first."""
        entries = sorted(self._entries.items(), key=lambda item: item[1].used)
        return [(sequence, entry.tokens) for sequence, entry in entries]

    def covered_by(self, tokens: Tokens) -> list[int]:
        """Sequences that hold nothing but a beginning of ``tokens``: they are of no further use."""
        return [s for s, e in self._entries.items() if common_prefix(e.tokens, tokens) == len(e.tokens)]

    def oldest(self, but: int | None = None) -> int | None:
        """The least recently used sequence (other than ``but``), to be evicted next."""
        rest = [(entry.used, sequence) for sequence, entry in self._entries.items() if sequence != but]
        return min(rest)[1] if rest else None


class LogitsCache:
    """The logits after the last few prompts.

    A prompt that comes again, as an editor's does, then needs no computation before its first tokens, and
    gives the same ones: recomputing its last token alone would round differently.
    """

    def __init__(self, limit: int = 32) -> None:
        self._limit = limit
        self._rows: collections.OrderedDict[bytes, NDArray[np.float32]] = collections.OrderedDict()

    def get(self, prompt: Tokens) -> NDArray[np.float32] | None:
        """The logits [n_vocab] after a prompt, if they are known."""
        key = prompt.tobytes()
        row = self._rows.get(key)
        if row is not None:
            self._rows.move_to_end(key)
        return row

    def put(self, prompt: Tokens, row: NDArray[np.float32]) -> None:
        """Keep the logits after a prompt; the least recently used ones give way."""
        self._rows[prompt.tobytes()] = row
        self._rows.move_to_end(prompt.tobytes())
        while len(self._rows) > self._limit:
            self._rows.popitem(last=False)

    def clear(self) -> None:
        """Forget them all."""
        self._rows.clear()
