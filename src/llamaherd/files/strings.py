"""Arrays of texts as they lie in a file: found in bulk, decoded one by one.

A vocabulary is 50,000 to 260,000 texts, each a length and its bytes. Opening a file must skip them, and a
load must know whether two are the same; neither needs a Python object for each.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

__all__ = ["StringArray", "decode_text", "scan_strings"]

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.signedinteger[Any]]

_WINDOW = 1 << 16  # bytes looked at together: fits the L2 cache, and malloc keeps such blocks
_BLOCK = 1 << 13  # texts hashed together, likewise
_ONES = np.uint64(0xFFFFFFFFFFFFFFFF)
_LOW = np.uint64(0x0101010101010101)
_HIGH = np.uint64(0x8080808080808080)
_BURST = 512  # strings walked one by one where looking in bulk does not pay


def decode_text(raw: bytes) -> str | bytes:
    """UTF-8 bytes as text; bytes that are not valid UTF-8 stay as they are."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


class StringArray(Sequence["str | bytes"]):
    """Texts lying in ``data`` (uint8): text i is the ``lengths[i]`` bytes from ``starts[i]`` on.

    Indexing decodes UTF-8; what is not valid UTF-8 comes as bytes.
    """

    def __init__(self, data: Bytes, starts: Offsets, lengths: Offsets) -> None:
        self._data = data
        self.starts = starts
        self.lengths = lengths

    @classmethod
    def from_texts(cls, texts: Iterable[str | bytes]) -> StringArray:
        """An array over a copy of ``texts``."""
        raws = [t.encode("utf-8") if isinstance(t, str) else t for t in texts]
        lengths = np.array([len(r) for r in raws], np.int64)
        starts = np.cumsum(lengths) - lengths
        return cls(np.frombuffer(b"".join(raws), np.uint8), starts, lengths)

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> str | bytes: ...
    @overload
    def __getitem__(self, index: slice) -> StringArray: ...
    def __getitem__(self, index: int | slice) -> str | bytes | StringArray:
        if isinstance(index, slice):
            return StringArray(self._data, self.starts[index], self.lengths[index])
        return decode_text(self.raw(index))

    def __iter__(self) -> Iterator[str | bytes]:
        if not len(self.starts):
            return iter(())
        low, starts, ends = self._span()
        region = self._data[low : low + int(ends.max())].tobytes()
        pairs = zip(starts.tolist(), ends.tolist(), strict=True)
        try:
            return iter([region[start:end].decode() for start, end in pairs])
        except UnicodeDecodeError:
            return map(decode_text, self.raws())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StringArray):
            return len(self) == len(other) and list(self.raws()) == list(other.raws())
        if isinstance(other, Sequence) and not isinstance(other, (str, bytes)):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<StringArray of {len(self)} texts>"

    @property
    def data(self) -> Bytes:
        """The bytes that `starts` and `lengths` point into."""
        return self._data

    def raw(self, index: int) -> bytes:
        """The bytes of text ``index``."""
        start = int(self.starts[index])
        return self._data[start : start + int(self.lengths[index])].tobytes()

    def _span(self) -> tuple[int, Offsets, Offsets]:
        """Where the texts begin in the file, and each one's start and end counted from there."""
        low = int(self.starts.min())
        starts = self.starts - low
        return low, starts, starts + self.lengths

    def raws(self) -> Iterator[bytes]:
        """The bytes of every text in turn."""
        if not len(self.starts):
            return
        low, starts, ends = self._span()
        region = self._data[low : low + int(ends.max())].tobytes()
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            yield region[start:end]

    def find_duplicate(self, *, c_strings: bool = False) -> tuple[int, int] | None:
        """The first pair (i, j), i < j, of equal texts, or None. About 5 ms for 50,000 texts.

        ``c_strings`` compares as C does: a text ends at its first NUL, and empty texts are all different.
        """
        hashes, any_nul = self._hashes()
        if c_strings and any_nul:
            cut = [raw.split(b"\0", 1)[0] for raw in self.raws()]
            return StringArray.from_texts(cut).find_duplicate(c_strings=True)
        if c_strings:
            empty = np.flatnonzero(self.lengths == 0)
            hashes[empty] = empty.astype(np.uint64)
        ranked = np.sort(hashes)
        if not (ranked[1:] == ranked[:-1]).any():
            return None
        order = np.argsort(hashes)
        ranked = hashes[order]
        same = np.flatnonzero(ranked[1:] == ranked[:-1])
        # equal hashes are only suspects: compare the bytes, in the array's order
        suspects = np.unique(np.concatenate([order[same], order[same + 1]]))
        seen: dict[bytes, int] = {}
        for index in suspects.tolist():
            if c_strings and not self.lengths[index]:
                continue
            first = seen.setdefault(self.raw(index), index)
            if first != index:
                return first, index
        return None

    def duplicates(self) -> list[tuple[int, int]]:
        """Every (first, later) pair of equal texts, each later one once."""
        found = []
        seen: dict[bytes, int] = {}
        for index, raw in enumerate(self.raws()):
            first = seen.setdefault(raw, index)
            if first != index:
                found.append((first, index))
        return found

    def _hashes(self) -> tuple[npt.NDArray[np.uint64], bool]:
        """A 64-bit hash of each text, eight bytes at a time over all texts; and whether any holds a NUL."""
        hashes: npt.NDArray[np.uint64] = self.lengths.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        any_nul = False
        for begin in range(0, len(self), _BLOCK):
            block = slice(begin, begin + _BLOCK)
            any_nul |= self[block]._mix(hashes[block])
        return hashes, any_nul

    def _mix(self, hashes: npt.NDArray[np.uint64]) -> bool:
        """Mix the texts into ``hashes``; returns whether any holds a NUL."""
        any_nul = False
        low, starts, ends = self._span()
        size = int(ends.max())
        region = np.zeros(size + 8, np.uint8)
        region[:-8] = self._data[low : low + size]
        words: npt.NDArray[np.uint64] = np.ndarray((size + 1,), "<u8", region.data, strides=(1,))
        live = np.flatnonzero(self.lengths > 0)
        at = 0
        while len(live):
            left = self.lengths[live] - at
            short = np.minimum(left, 8).astype(np.uint64)
            mask = _ONES >> ((np.uint64(8) - short) * np.uint64(8))
            word = words[starts[live] + at] & mask
            filled = word | ~mask
            # the classic test for a zero byte in a word
            any_nul = any_nul or bool(((filled - _LOW) & ~filled & _HIGH).any())
            mixed = (hashes[live] ^ word) * np.uint64(0xBF58476D1CE4E5B9)
            hashes[live] = mixed ^ (mixed >> np.uint64(29))
            at += 8
            live = live[left > 8]
            if at >= 512 or len(live) < 64:  # the few long texts by Python's own hash
                for i in live.tolist():
                    raw = self.raw(i)
                    any_nul = any_nul or 0 in raw
                    hashes[i] = np.uint64(hash(raw) & 0xFFFFFFFFFFFFFFFF)
                break
        return any_nul


def scan_strings(
    data: Bytes, start: int, count: int, *, width: int = 8, gap: int = 0, big_endian: bool = False
) -> tuple[Offsets, Offsets, int] | None:
    """Find ``count`` length-prefixed texts from byte ``start`` on: (starts, lengths, end).

    ``width`` is the size of a length: 8 bytes, or 4 in the oldest files; ``gap`` bytes of something else
    follow each text. None if they do not all fit into ``data``. Each text's place depends on the length
    before it, so this would be a loop; instead, all places that look like a short length (7 or 3 zero
    bytes) are taken from a window at once, and the chain through them is proved in bulk; only where that
    fails does it walk.
    """
    size = len(data)
    if count < 0 or start < 0 or count > (size - start) // (width + gap):
        return None
    # a text of 2 GiB is refused; 8 to 12 bytes a text keep hostile vocabularies within twice their file
    heads: Offsets = np.empty(count, np.int32 if size < 1 << 31 else np.int64)
    found, at, burst = 0, start, _BURST
    dtype = np.dtype(f"{'>' if big_endian else '<'}u{width}")
    while found < count:
        if not big_endian and count - found > 64:
            chain = _chain(data[at : at + _WINDOW], width, gap)[: count - found]
            if len(chain) > 16:
                heads[found : found + len(chain)] = chain + at
                found += len(chain)
                at = int(heads[found - 1])
                at += width + int(data[at : at + width].view(dtype)[0]) + gap
                burst = _BURST
                if at > size:
                    return None
                continue
            burst *= 2
        walked = _walk(data, at, heads[found : found + burst], width, gap, big_endian)
        if walked is None:
            return None
        found += min(burst, count - found)
        at = walked
    lengths = np.empty(count, np.int32)
    if count:
        np.subtract(heads[1:], heads[:-1], out=lengths[:-1], casting="unsafe")
        lengths[-1] = min(at - int(heads[-1]), (1 << 31) - 1)
        lengths -= width + gap
        heads += width
        if (lengths < 0).any():
            return None
    return heads, lengths, at


def _walk(data: Bytes, at: int, heads: Offsets, width: int, gap: int, big_endian: bool) -> int | None:
    """Fill ``heads`` with the places of the next texts; returns the end, or None if they do not fit."""
    size, view = len(data), data.data
    length = struct.Struct((">" if big_endian else "<") + {4: "I", 8: "Q"}[width]).unpack_from
    for i in range(len(heads)):
        if at + width > size:
            return None
        heads[i] = at
        at += width + length(view, at)[0] + gap
        if at > size:
            return None
    return at


def _chain(window: Bytes, width: int, gap: int) -> Offsets:
    """Places of texts shorter than 256 bytes that follow one another from the window's first byte on."""
    run, have = width - 1, 1
    zeros = window == 0
    while have < run:  # zeros[i]: the `have` bytes from i on are zero
        step = min(have, run - have)
        zeros = zeros[:-step] & zeros[step:]
        have += step
    places: Offsets = np.flatnonzero(zeros) - 1
    places = places[places >= 0]
    if not len(places) or places[0] != 0:
        return np.empty(0, np.int64)
    follows = places + width + window[places] + gap
    good = follows[:-1] == places[1:]
    breaks = np.flatnonzero(~good)
    return places[: (int(breaks[0]) + 1 if len(breaks) else len(places))]
