"""What each sequence of a pipeline was computed from, piece by piece, so that it can be computed again.

llama.cpp's rounding depends on how many tokens are computed together. A lost stage's cache is therefore
rebuilt in the pieces in which it was made at first: the chunks of a prompt, then token by token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ..engine.protocol import Batch, FloatArray, IntArray
from .work import Operation, Work

__all__ = ["History"]


@dataclass(frozen=True, eq=False)
class Piece:
    """Consecutive tokens of one sequence that were computed together.

    Attributes:
        tokens, embeddings: either.
        alone: nothing else was in the batch.
    """

    tokens: IntArray | None
    embeddings: FloatArray | None
    alone: bool

    def __len__(self) -> int:
        given = self.tokens if self.tokens is not None else self.embeddings
        assert given is not None
        return len(given)


Entry: TypeAlias = tuple[Piece, int]
"""A piece, and how many of its tokens the sequence has kept."""


class History:
    """The pieces of every sequence."""

    def __init__(self, together: int = 16) -> None:
        self._entries: dict[int, tuple[Entry, ...]] = {}
        self._together = together  # most sequences whose tokens are computed in one batch again

    def apply(self, operations: Sequence[Operation]) -> None:
        """Follow operations."""
        entries = self._entries
        for operation in operations:
            sequence = operation.sequence
            if operation.kind == "allocate":
                entries[sequence] = ()
            elif operation.kind == "release":
                del entries[sequence]
            elif operation.kind == "trim":
                entries[sequence] = _cut(entries[sequence], operation.length)
            else:
                entries[sequence] = _cut(entries[operation.source], operation.length)

    def append(self, batch: Batch) -> None:
        """Follow a batch that was computed."""
        alone = len(set(batch.sequences.tolist())) == 1
        for sequence in dict.fromkeys(batch.sequences.tolist()):
            rows = np.flatnonzero(batch.sequences == sequence)
            piece = Piece(
                None if batch.tokens is None else batch.tokens[rows].copy(),
                None if batch.embeddings is None else batch.embeddings[rows].copy(),
                alone,
            )
            self._entries[sequence] += ((piece, len(piece)),)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return sum(kept for _, kept in self._entries[sequence])

    def replay(self) -> Iterator[Work]:
        """Steps that make all sequences anew, from nothing; what forks share is computed once."""
        rebuilding = [_Rebuilding(s, entries) for s, entries in sorted(self._entries.items())]
        _find_donors(rebuilding)
        by_sequence = {r.sequence: r for r in rebuilding}
        while True:
            operations: list[Operation] = []
            for r in rebuilding:
                donor = by_sequence.get(r.donor)
                if not r.begun and (donor is None or (donor.begun and donor.done >= r.shared)):
                    operations.append(r.begin())
            active = [r for r in rebuilding if r.begun and r.done < len(r.entries)]
            if not active:
                if operations:
                    yield Work(tuple(operations), None)
                if all(r.begun for r in rebuilding):
                    return
                continue
            apart = [r for r in active if not r.with_others]
            alike = [r for r in active if (r.piece.tokens is None) == (active[0].piece.tokens is None)]
            chosen = apart[:1] or alike[: self._together]
            yield Work(tuple(operations), _batch(chosen))
            trims = tuple(trim for r in chosen for trim in r.advance())
            if trims:
                yield Work(trims, None)


class _Rebuilding:
    """A sequence on its way back."""

    def __init__(self, sequence: int, entries: tuple[Entry, ...]) -> None:
        self.sequence = sequence
        self.entries = entries
        self.donor, self.shared = -1, 0
        self.begun = False
        self.done = 0
        self.position = 0

    def begin(self) -> Operation:
        """Allocate it, or fork it from its donor."""
        self.begun, self.done = True, self.shared
        self.position = sum(kept for _, kept in self.entries[: self.shared])
        if not self.shared:
            return Operation("allocate", self.sequence)
        return Operation("fork", self.sequence, self.donor, self.position)

    @property
    def piece(self) -> Piece:
        """The next one."""
        return self.entries[self.done][0]

    @property
    def with_others(self) -> bool:
        """Whether the next piece is a token that was computed together with others'."""
        return len(self.piece) == 1 and not self.piece.alone

    def advance(self) -> Iterator[Operation]:
        """The next piece was computed."""
        piece, kept = self.entries[self.done]
        self.done += 1
        self.position += kept
        if kept < len(piece):
            yield Operation("trim", self.sequence, length=self.position)


def _find_donors(rebuilding: list[_Rebuilding]) -> None:
    """For each sequence the earlier one with which it shares most pieces."""
    for i, r in enumerate(rebuilding):
        for earlier in rebuilding[:i]:
            shared = _common(earlier.entries, r.entries)
            if shared > r.shared:
                r.donor, r.shared = earlier.sequence, shared


def _common(donor: tuple[Entry, ...], own: tuple[Entry, ...]) -> int:
    """Pieces at the beginning of both; the last of them may be kept longer by the donor."""
    count = 0
    for (a, kept_a), (b, kept_b) in zip(donor, own, strict=False):
        if a is not b or kept_a < kept_b:
            break
        count += 1
        if kept_a > kept_b:
            break
    return count


def _cut(entries: tuple[Entry, ...], length: int) -> tuple[Entry, ...]:
    kept: list[Entry] = []
    for piece, n in entries:
        if length <= 0:
            break
        kept.append((piece, min(n, length)))
        length -= n
    return tuple(kept)


def _batch(chosen: list[_Rebuilding]) -> Batch:
    """The next pieces of these sequences together; nothing of it is put out."""
    counts = [len(r.piece) for r in chosen]
    positions = [np.arange(r.position, r.position + len(r.piece), dtype=np.int32) for r in chosen]
    pieces = [r.piece for r in chosen]
    tokens = [p.tokens for p in pieces if p.tokens is not None]
    embeddings = [p.embeddings for p in pieces if p.embeddings is not None]
    return Batch(
        tokens=np.concatenate(tokens) if tokens else None,
        positions=np.concatenate(positions),
        sequences=np.repeat(np.array([r.sequence for r in chosen], np.int32), counts),
        outputs=np.zeros(sum(counts), np.bool_),
        embeddings=np.concatenate(embeddings) if embeddings else None,
    )
