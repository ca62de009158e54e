from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llamaherd.files.metadata import Metadata, TypedValue, ValueType, to_typed
from llamaherd.files.strings import StringArray


@pytest.mark.parametrize(
    ("value", "kind", "element"),
    [
        (True, ValueType.BOOL, None),
        (0, ValueType.UINT32, None),
        (-1, ValueType.INT32, None),
        (2**40, ValueType.UINT64, None),
        (-(2**40), ValueType.INT64, None),
        (1.0, ValueType.FLOAT32, None),
        ("x", ValueType.STRING, None),
        (b"\xff", ValueType.STRING, None),
        ([1, 2], ValueType.ARRAY, ValueType.INT32),
        ([1, 2**31], ValueType.ARRAY, ValueType.UINT32),
        ([1, 0.5], ValueType.ARRAY, ValueType.FLOAT32),
        (["a", b"\xff"], ValueType.ARRAY, ValueType.STRING),
        ([True], ValueType.ARRAY, ValueType.BOOL),
        (np.zeros(2, np.int8), ValueType.ARRAY, ValueType.INT8),
        (StringArray.from_texts(["a"]), ValueType.ARRAY, ValueType.STRING),
    ],
)
def test_plain_values_get_the_usual_type(value: Any, kind: ValueType, element: ValueType | None) -> None:
    typed = to_typed(value)
    assert (typed.type, typed.element_type) == (kind, element)
    assert to_typed(typed) is typed


@pytest.mark.parametrize(
    "value", [2**64, -(2**63) - 1, [2**64], ["a", 1], object(), np.zeros(2, np.complex64)]
)
def test_what_gguf_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="metadata"):
        to_typed(value)


def test_equality_tells_types_apart() -> None:
    assert TypedValue(ValueType.UINT32, 1) != TypedValue(ValueType.INT32, 1)
    assert to_typed([1, 2]) == to_typed([1, 2])
    assert to_typed([1, 2]) != to_typed([1, 3])
    assert to_typed(["a"]) == to_typed(StringArray.from_texts(["a"]))
    with pytest.raises(ValueError, match="element_type"):
        TypedValue(ValueType.ARRAY, [1])


def test_metadata_loads_once_and_only_when_asked() -> None:
    asked = []

    def load() -> int:
        asked.append(1)
        return 5

    metadata = Metadata({"a": (ValueType.UINT32, None, load)})
    assert "a" in metadata
    assert not asked
    assert (metadata["a"], metadata["a"], len(asked)) == (5, 5, 1)
    with pytest.raises(KeyError):
        metadata["b"]
    assert Metadata.from_values({"x": 1, "y": "z"}).typed("x") == TypedValue(ValueType.UINT32, 1)
