"""Typed metadata: the key-value pairs of a model file, with GGUF's value types kept.

A plain Python value cannot say whether 30 was a u32 or an i64, so a file copied through plain values would
change. `TypedValue` pairs the value with its type; `Metadata` is the mapping that a file shows, plain
values by default and typed ones through `Metadata.typed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np

from llamaherd.files.strings import StringArray

__all__ = ["Metadata", "TypedValue", "Value", "ValueType", "to_typed"]


class ValueType(IntEnum):
    """GGUF's value types, with the numbers the file stores (``enum gguf_type`` in llama.cpp)."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The little-endian numpy type of one value as stored; None for strings and arrays."""
        return _DTYPES.get(self)


_DTYPES: dict[ValueType, np.dtype[Any]] = {
    ValueType.UINT8: np.dtype("<u1"),
    ValueType.INT8: np.dtype("<i1"),
    ValueType.UINT16: np.dtype("<u2"),
    ValueType.INT16: np.dtype("<i2"),
    ValueType.UINT32: np.dtype("<u4"),
    ValueType.INT32: np.dtype("<i4"),
    ValueType.FLOAT32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("?"),
    ValueType.UINT64: np.dtype("<u8"),
    ValueType.INT64: np.dtype("<i8"),
    ValueType.FLOAT64: np.dtype("<f8"),
}

Scalar: TypeAlias = bool | int | float | str | bytes
"""One value. Text that is not valid UTF-8 stays ``bytes``."""

Value: TypeAlias = Scalar | np.ndarray[Any, np.dtype[Any]] | StringArray | list[Any]
"""A scalar, an array of numbers or bools (numpy), of texts (`StringArray` or a list), or of arrays."""


@dataclass(frozen=True)
class TypedValue:
    """A metadata value with its GGUF type.

    ``element_type`` is set exactly when ``type`` is ARRAY. An array of arrays holds a list of `TypedValue`.
    """

    type: ValueType
    value: Value
    element_type: ValueType | None = None

    def __post_init__(self) -> None:
        if (self.type is ValueType.ARRAY) != (self.element_type is not None):
            raise ValueError("element_type belongs to arrays, and to every array")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TypedValue):
            return NotImplemented
        if (self.type, self.element_type) != (other.type, other.element_type):
            return False
        if isinstance(self.value, np.ndarray) or isinstance(other.value, np.ndarray):
            return bool(np.array_equal(np.asarray(self.value), np.asarray(other.value), equal_nan=False))
        if self.type is ValueType.ARRAY:
            mine, theirs = self.value, other.value
            return list(mine) == list(theirs)  # type: ignore[arg-type]
        return bool(self.value == other.value)

    __hash__ = None  # type: ignore[assignment]


def to_typed(value: Value | TypedValue) -> TypedValue:
    """Give a plain value the type GGUF files commonly use for it.

    int: u32 where it fits, else i32, u64, i64; float: f32; sequences: by their elements (ints i32 where
    all fit). A `TypedValue` is returned as it is. Raises TypeError for anything else.
    """
    if isinstance(value, TypedValue):
        return value
    if isinstance(value, (bool, np.bool_)):
        return TypedValue(ValueType.BOOL, bool(value))
    if isinstance(value, (int, np.integer)):
        return TypedValue(_int_type(int(value)), int(value))
    if isinstance(value, (float, np.floating)):
        return TypedValue(ValueType.FLOAT32, float(value))
    if isinstance(value, (str, bytes)):
        return TypedValue(ValueType.STRING, value)
    if isinstance(value, StringArray):
        return TypedValue(ValueType.ARRAY, value, ValueType.STRING)
    if isinstance(value, np.ndarray):
        for kind, dtype in _DTYPES.items():
            if value.dtype == dtype:
                return TypedValue(ValueType.ARRAY, value, kind)
        raise TypeError(f"metadata cannot hold an array of {value.dtype}")
    if isinstance(value, Sequence):
        return _typed_sequence(list(value))
    raise TypeError(f"metadata cannot hold a {type(value).__name__}")


def _int_type(value: int) -> ValueType:
    for kind in (ValueType.UINT32, ValueType.INT32, ValueType.UINT64, ValueType.INT64):
        info = np.iinfo(_DTYPES[kind])
        if info.min <= value <= info.max:
            return kind
    raise TypeError(f"metadata cannot hold the integer {value}: it needs more than 64 bits")


def _typed_sequence(items: list[Any]) -> TypedValue:
    array = ValueType.ARRAY
    if all(isinstance(x, (str, bytes)) for x in items) and items:
        return TypedValue(array, items, ValueType.STRING)
    if all(isinstance(x, (bool, np.bool_)) for x in items) and items:
        return TypedValue(array, np.array(items, np.bool_), ValueType.BOOL)
    if all(isinstance(x, (int, np.integer)) for x in items):
        kinds = (ValueType.INT32, ValueType.UINT32, ValueType.INT64, ValueType.UINT64)
        for kind in kinds:
            info = np.iinfo(_DTYPES[kind])
            if all(info.min <= x <= info.max for x in items):
                return TypedValue(array, np.array(items, _DTYPES[kind]), kind)
        raise TypeError("metadata cannot hold an integer of more than 64 bits")
    if all(isinstance(x, (int, float, np.integer, np.floating)) for x in items):
        return TypedValue(array, np.array(items, "<f4"), ValueType.FLOAT32)
    raise TypeError("a metadata array must be all text, all bool, all int or all float")


class Metadata(Mapping[str, Value]):
    """The metadata of one file: plain values by key, each parsed when it is first asked for.

    ``loaders`` gives for each key its type, its element type (arrays) and a function that parses the value
    out of the mapped file. Iteration is in the file's order.
    """

    def __init__(
        self, loaders: Mapping[str, tuple[ValueType, ValueType | None, Callable[[], Value]]]
    ) -> None:
        self._loaders = dict(loaders)
        self._values: dict[str, Value] = {}

    @classmethod
    def from_values(cls, values: Mapping[str, Value | TypedValue]) -> Metadata:
        """Metadata over values that are there already (see `to_typed` for plain ones)."""
        typed = {key: to_typed(value) for key, value in values.items()}
        return cls({key: (t.type, t.element_type, lambda t=t: t.value) for key, t in typed.items()})  # type: ignore[misc]

    def __getitem__(self, key: str) -> Value:
        if key not in self._values:
            self._values[key] = self._loaders[key][2]()
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaders)

    def __len__(self) -> int:
        return len(self._loaders)

    def __contains__(self, key: object) -> bool:
        return key in self._loaders

    def type_of(self, key: str) -> tuple[ValueType, ValueType | None]:
        """The type of ``key``'s value, and of its elements if it is an array; nothing is parsed."""
        kind, element, _ = self._loaders[key]
        return kind, element

    def typed(self, key: str) -> TypedValue:
        """The value of ``key`` with its type, for writing it again unchanged."""
        kind, element = self.type_of(key)
        return TypedValue(kind, self[key], element)

    def typed_items(self) -> dict[str, TypedValue]:
        """Every pair with its type, in the file's order."""
        return {key: self.typed(key) for key in self}
