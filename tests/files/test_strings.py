from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaherd.files.strings import StringArray, scan_strings

texts = st.lists(
    st.one_of(st.binary(max_size=12), st.sampled_from([b"", b"\0", b"a" * 300, b"\0" * 20, b"x" * 1000])),
    max_size=400,
)


def stored(raws: list[bytes], width: int, gap: bytes, order: str) -> bytes:
    code = {4: "I", 8: "Q"}[width]
    return b"".join(struct.pack(order + code, len(raw)) + raw + gap for raw in raws)


@settings(max_examples=200, deadline=None)
@given(
    texts, st.sampled_from([4, 8]), st.sampled_from([b"", b"\0\0\0\0", b"\1\2\3\4"]), st.sampled_from("<>")
)
def test_scanning_finds_what_was_written(raws: list[bytes], width: int, gap: bytes, order: str) -> None:
    data = np.frombuffer(b"??" + stored(raws, width, gap, order) + b"rest", np.uint8)
    found = scan_strings(data, 2, len(raws), width=width, gap=len(gap), big_endian=order == ">")
    assert found is not None
    array = StringArray(data, found[0], found[1])
    assert list(array.raws()) == raws
    assert found[2] == len(data) - 4
    assert scan_strings(data, 2, len(raws) + 10**6, width=width, gap=len(gap)) is None


@settings(max_examples=200, deadline=None)
@given(texts, st.integers(0, 4000))
def test_a_cut_array_is_not_found(raws: list[bytes], cut: int) -> None:
    whole = stored(raws, 8, b"", "<")
    data = np.frombuffer(whole[: min(cut, len(whole))], np.uint8)
    found = scan_strings(data, 0, len(raws))
    assert (found is None) == (len(data) < len(whole))


def test_a_vocabulary_takes_the_bulk_path_and_agrees() -> None:
    raws = [b"token %d" % i for i in range(50_000)]
    raws[777] = b""
    raws[20_000] = b"long" * 5000
    data = np.frombuffer(stored(raws, 8, b"", "<"), np.uint8)
    found = scan_strings(data, 0, len(raws))
    assert found is not None
    assert list(StringArray(data, found[0], found[1]).raws()) == raws


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=3), st.binary(max_size=30)), max_size=60), st.booleans())
def test_the_first_duplicate_is_found(raws: list[bytes], c_strings: bool) -> None:
    seen: dict[bytes, int] = {}
    expected = None
    for index, raw in enumerate(raws):
        text = raw.split(b"\0", 1)[0] if c_strings else raw
        if c_strings and not text:
            continue
        if text in seen:
            expected = (seen[text], index)
            break
        seen[text] = index
    assert StringArray.from_texts(raws).find_duplicate(c_strings=c_strings) == expected


def test_long_texts_that_differ_at_the_end_are_no_duplicates() -> None:
    array = StringArray.from_texts([b"x" * 600 + b"a", b"x" * 600 + b"b", b"x" * 600 + b"a"])
    assert array.find_duplicate() == (0, 2)
    assert array.duplicates() == [(0, 2)]


def test_bad_utf8_stays_bytes() -> None:
    array = StringArray.from_texts(["é", b"\xff", "b"])
    assert list(array) == ["é", b"\xff", "b"]
    assert array[1] == b"\xff"
    assert array[1:] == [b"\xff", "b"]
    assert array != ["é", b"\xff"]
    with pytest.raises(IndexError):
        array[3]
