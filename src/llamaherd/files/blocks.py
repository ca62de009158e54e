"""Quantised blocks of each era: decode them, repack them from one era's layout into another's.

A block of the simple types is a scale d, perhaps a minimum m, and small integers q: weight = d * q (+ m). The
eras differ in the width of d and m, and in which nibble holds which weight. Repacking moves the integers
exactly; only scales narrowed from f32 to f16 are rounded, and the caller is told by how much.
Today's other types are decoded by the ``gguf`` package's reference code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llamaherd.errors import UnsupportedFileError
from llamaherd.files.block_types import BlockType
from llamaherd.files.model_file import Tensor

__all__ = ["Rounding", "can_repack", "dequantize", "encode_floats", "repack", "scales"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_CHUNK = 1 << 16  # blocks decoded together: a few MB of temporaries


class _Layout(NamedTuple):
    """A block: its scale's type, whether a minimum follows, fifth bits, bits a weight, nibble order, zero."""

    scale: str
    minimum: bool
    bits: int
    pairs: bool  # byte l holds weights 2l and 2l+1; otherwise j and j + half
    zero: int  # subtracted from the stored integer


def _layouts() -> dict[tuple[int, int], _Layout]:
    """(era, type number) -> layout, for the types that changed between eras."""
    table: dict[tuple[int, int], _Layout] = {}
    for era in (1, 2, 3):
        wide = "<f4" if era < 3 else "<f2"
        pairs = era == 1
        table[era, 2] = _Layout(wide, False, 4, pairs, 8)
        table[era, 3] = _Layout(wide, True, 4, pairs, 0)
        table[era, 6] = _Layout("<f2", False, 5, pairs, 16)
        table[era, 7] = _Layout("<f2", True, 5, pairs, 0)
        table[era, 8] = _Layout(wide, False, 8, pairs, 0)
    table[1, 4] = _Layout("<f2", False, 4, True, 8)
    table[1, 5] = _Layout("<f2", True, 4, True, 0)
    return table


_LAYOUTS = _layouts()


def _layout(kind: BlockType) -> _Layout | None:
    return _LAYOUTS.get((kind.era, kind.number))


@dataclass(frozen=True)
class Rounding:
    """What repacking changed: ``changed`` of ``count`` scales, by at most ``largest`` relative to the old."""

    changed: int = 0
    count: int = 0
    largest: float = 0.0

    @classmethod
    def between(cls, before: Floats, after: Floats) -> Rounding:
        """What storing ``before`` as ``after`` changed. Raises ValueError where a number became infinite."""
        finite = np.isfinite(before)
        lost = finite & ~np.isfinite(after)
        if lost.any():
            raise ValueError(f"{before[lost][0]:g} is too large for it")
        changed = (after != before) & finite
        if not changed.any():
            return cls(0, before.size)
        old = before[changed]
        largest = float(np.max(np.abs(after[changed] - old) / np.abs(old)))
        return cls(int(changed.sum()), before.size, largest)

    def __add__(self, other: Rounding) -> Rounding:
        return Rounding(
            self.changed + other.changed, self.count + other.count, max(self.largest, other.largest)
        )


@dataclass
class _Blocks:
    """Blocks taken apart: d and m are (n,) float32, q is (n, block_size) uint8 as stored (or int8 bits)."""

    d: Floats
    m: Floats | None
    q: Bytes


def _unpack(raw: Bytes, kind: BlockType, layout: _Layout) -> _Blocks:
    blocks = raw.reshape(-1, kind.block_bytes)
    width = np.dtype(layout.scale).itemsize
    d = np.ascontiguousarray(blocks[:, :width]).view(layout.scale)[:, 0].astype(np.float32)
    at = width
    m = None
    if layout.minimum:
        m = np.ascontiguousarray(blocks[:, at : at + width]).view(layout.scale)[:, 0].astype(np.float32)
        at += width
    fifth: Bytes | None = None
    if layout.bits == 5:
        fifth = np.unpackbits(np.ascontiguousarray(blocks[:, at : at + 4]), axis=1, bitorder="little")
        at += 4
    body = blocks[:, at:]
    if layout.bits == 8:
        return _Blocks(d, m, body)
    q = np.empty((len(blocks), kind.block_size), np.uint8)
    if layout.pairs:
        q[:, 0::2] = body & 15
        q[:, 1::2] = body >> 4
    else:
        half = kind.block_size // 2
        q[:, :half] = body & 15
        q[:, half:] = body >> 4
    if fifth is not None:
        np.bitwise_or(q, fifth << np.uint8(4), out=q)
    return _Blocks(d, m, q)


def _narrow(values: Floats, dtype: str) -> npt.NDArray[Any]:
    with np.errstate(over="ignore"):
        return values.astype(dtype)


# ------------------------------------------------------------------------------------ repacking


def can_repack(source: BlockType, target: BlockType) -> bool:
    """Whether blocks of ``source`` can become blocks of ``target`` without requantising."""
    if source == target:
        return True
    return source.number == target.number and _layout(source) is not None and _layout(target) is not None


def repack(raw: Bytes, source: BlockType, target: BlockType) -> tuple[Bytes, Rounding]:
    """The same weights in another era's layout of the same type, and what was rounded.

    The result is ``raw`` itself where the layouts are equal. Raises ValueError if the types differ, or a
    scale does not fit the narrower f16 of the target.
    """
    if source == target:
        return raw, Rounding()
    before, after = _layout(source), _layout(target)
    if not can_repack(source, target) or before is None or after is None:
        raise ValueError(f"{source} blocks cannot be repacked into {target}")
    n = raw.size // source.block_bytes
    old, new = raw.reshape(n, source.block_bytes), np.empty((n, target.block_bytes), np.uint8)
    rounding = Rounding()
    for start in range(0, n, _CHUNK):
        part = slice(start, min(start + _CHUNK, n))
        rounding += _repack_chunk(old[part], new[part], before, after)
    return new.reshape(-1), rounding


def _repack_chunk(old: Bytes, new: Bytes, before: _Layout, after: _Layout) -> Rounding:
    """Fill ``new`` (blocks, bytes) with the blocks of ``old``: scales, fifth bits, nibbles."""
    count = 2 if before.minimum else 1
    width, new_width = (np.dtype(layout.scale).itemsize * count for layout in (before, after))
    scales = np.ascontiguousarray(old[:, :width]).view(before.scale)
    new[:, :new_width] = _narrow(scales, after.scale).view(np.uint8)
    body, new_body = old[:, width:], new[:, new_width:]
    if before.bits == 5:  # bit l is the fifth of weight l in every era
        new_body[:, :4] = body[:, :4]
        body, new_body = body[:, 4:], new_body[:, 4:]
    if before.pairs == after.pairs or before.bits == 8:
        new_body[:] = body
    elif before.pairs:
        first, second = body[:, :8], body[:, 8:]  # weights 0-15 and 16-31
        new_body[:, 0::2] = (first & 15) | (second << 4)
        new_body[:, 1::2] = (first >> 4) | (second & 0xF0)
    else:
        even, odd = body[:, 0::2], body[:, 1::2]
        new_body[:, :8] = (even & 15) | (odd << 4)
        new_body[:, 8:] = (even >> 4) | (odd & 0xF0)
    if before.scale == after.scale:
        return Rounding()
    return _rounding(scales.astype(np.float32).reshape(-1), after.scale)


def _rounding(values: Floats, dtype: str) -> Rounding:
    try:
        return Rounding.between(values, _narrow(values, dtype).astype(np.float32))
    except ValueError as error:
        raise ValueError(f"a scale does not fit an f16 ({error}); convert to f32 instead") from None


# ------------------------------------------------------------------------------------- decoding

_PLAIN = {0: "f4", 1: "f2", 24: "i1", 25: "i2", 26: "i4", 27: "i8", 28: "f8"}
_BF16 = 30
_MXFP4 = 39


def dequantize(tensor: Tensor) -> Floats:
    """See `Tensor.dequantize`. Damaged scales give NaN or infinite weights, without a warning."""
    with np.errstate(all="ignore"):
        return _dequantize(tensor)


def _dequantize(tensor: Tensor) -> Floats:
    raw, kind = tensor.raw, tensor.type
    shape = tensor.shape[::-1]
    order = ">" if tensor.big_endian else "<"
    if kind.number in _PLAIN:
        return raw.view(order + _PLAIN[kind.number]).astype(np.float32).reshape(shape)
    if kind.number == _BF16:
        wide = raw.view(order + "u2").astype("<u4") << 16
        return wide.view("<f4").reshape(shape)
    if tensor.big_endian:
        raise UnsupportedFileError(
            tensor.name, f"{kind} blocks in big-endian order are not decoded; gguf's tools can swap them"
        )
    layout = _layout(kind)
    if layout is not None:
        return _decode(raw, kind, layout).reshape(shape)
    return _decode_reference(tensor).reshape(shape)


def encode_floats(weights: Floats, kind: BlockType) -> tuple[Bytes, Rounding]:
    """Flat float32 weights as f32, f16 or bf16 bytes, rounded to nearest even, and what was rounded.

    Raises ValueError for another type, or a weight that is too large for f16.
    """
    if kind.number == 0:
        return np.ascontiguousarray(weights, "<f4").view(np.uint8), Rounding(0, weights.size)
    if kind.number == 1:
        half = _narrow(weights, "<f2")
        return half.view(np.uint8), Rounding.between(weights, half.astype(np.float32))
    if kind.number != _BF16:
        raise ValueError(f"{kind} is not one of f32, f16, bf16")
    bits = np.ascontiguousarray(weights, "<f4").view("<u4").astype(np.uint64)
    top = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    quiet = ((bits >> 16) | 64).astype("<u2")  # a NaN whose low bits are cut must not become inf
    top = np.where(np.isnan(weights), quiet, top).astype("<u2")
    return top.view(np.uint8), Rounding.between(weights, (top.astype("<u4") << 16).view("<f4"))


def _decode(raw: Bytes, kind: BlockType, layout: _Layout) -> Floats:
    """weight = d * (q - zero) + m, block by block."""
    n = raw.size // kind.block_bytes
    out = np.empty((n, kind.block_size), np.float32)
    for start in range(0, n, _CHUNK):
        stop = min(start + _CHUNK, n)
        blocks = _unpack(raw[start * kind.block_bytes : stop * kind.block_bytes], kind, layout)
        q = blocks.q.view(np.int8).astype(np.float32)
        part = out[start:stop]
        np.multiply(q - layout.zero, blocks.d[:, None], out=part)
        if blocks.m is not None:
            part += blocks.m[:, None]
    return out


def _decode_reference(tensor: Tensor) -> Floats:
    import gguf  # its tables take 0.1 s to import, and most files are opened without decoding

    kind = tensor.type
    try:
        if not kind.known or kind.removed:
            raise NotImplementedError
        number = gguf.GGMLQuantizationType(kind.number)
        if gguf.GGML_QUANT_SIZES[number] != (kind.block_size, kind.block_bytes):
            raise NotImplementedError
        decoded: Floats = gguf.quants.dequantize(tensor.raw.reshape(-1, kind.block_bytes), number)
    except (NotImplementedError, ValueError):
        raise UnsupportedFileError(
            tensor.name, f"no decoder for tensor type {kind} is known; libllama may still run it"
        ) from None
    return decoded


# --------------------------------------------------------------------------------------- scales

# where today's super-blocks keep their f16 (or f32) scales
_SCALE_OFFSETS: dict[int, tuple[tuple[int, str], ...]] = {
    9: ((0, "<f2"), (2, "<f2")),
    10: ((80, "<f2"), (82, "<f2")),
    11: ((108, "<f2"),),
    12: ((0, "<f2"), (2, "<f2")),
    13: ((0, "<f2"), (2, "<f2")),
    14: ((208, "<f2"),),
    15: ((0, "<f4"),),
    16: ((0, "<f2"),),
    17: ((0, "<f2"),),
    18: ((0, "<f2"),),
    19: ((0, "<f2"),),
    20: ((0, "<f2"),),
    21: ((0, "<f2"),),
    22: ((0, "<f2"),),
    23: ((0, "<f2"),),
    34: ((52, "<f2"),),
    35: ((64, "<f2"),),
    41: ((0, "<f2"),),
    42: ((0, "<f2"),),
}


def scales(raw: Bytes, kind: BlockType) -> npt.NDArray[Any] | None:
    """All floating-point scales in ``raw`` (for plain float types: the weights), to look for NaN and inf.

    None for types whose scales are not floating-point numbers, or not known.
    """
    if kind.number in (0, 1, 28):
        return raw.view("<" + _PLAIN[kind.number])
    if kind.number == _MXFP4:
        exponents = raw.reshape(-1, kind.block_bytes)[:, 0]
        found_nan: Floats = np.where(exponents == 255, np.float32(np.nan), np.float32(1))
        return found_nan
    if kind.number == _BF16:
        return (raw.view("<u2").astype("<u4") << 16).view("<f4")
    layout = _layout(kind)
    if layout is not None:
        count = 2 if layout.minimum else 1
        size = np.dtype(layout.scale).itemsize * count
        head = raw.reshape(-1, kind.block_bytes)[:, :size]
        return np.ascontiguousarray(head).view(layout.scale).reshape(-1)
    places = _SCALE_OFFSETS.get(kind.number)
    if places is None or not kind.known:
        return None
    blocks = raw.reshape(-1, kind.block_bytes)
    found = [
        np.ascontiguousarray(blocks[:, at : at + np.dtype(dtype).itemsize]).view(dtype).reshape(-1)
        for at, dtype in places
    ]
    return np.concatenate(found)
