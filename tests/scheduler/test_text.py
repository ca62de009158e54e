import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaherd.scheduler.text import TextStream


def feed(pieces, stop=()):
    """All text that a stream lets go, and the stop text that ended it."""
    stream = TextStream(stop)
    text = ""
    for i, piece in enumerate(pieces):
        delta = stream.push(piece, final=i == len(pieces) - 1)
        text += delta.text
        if delta.stop is not None:
            return text, delta.stop
    return text, None


@given(st.lists(st.binary(max_size=5), min_size=1, max_size=30))
def test_streamed_text_equals_text_decoded_at_once(pieces):
    assert feed(pieces)[0] == b"".join(pieces).decode("utf-8", "replace")


def test_half_a_character_is_held_back():
    stream = TextStream()
    euro = "€".encode()
    assert stream.push(euro[:2]).text == ""
    assert stream.push(euro[2:]).text == "€"


def test_invalid_bytes_show_as_replacement_character():
    assert feed([b"a\xff", b"b"])[0] == "a\ufffdb"
    assert feed([b"a", "€".encode()[:2]])[0] == "a\ufffd"


def test_a_stop_text_across_tokens_never_leaks():
    stream = TextStream(["\n\n"])
    assert stream.push(b"one\n").text == "one"
    delta = stream.push(b"\ntwo")
    assert (delta.text, delta.stop) == ("", "\n\n")


def test_what_turns_out_not_to_be_a_stop_text_comes_later():
    stream = TextStream(["STOP"])
    assert stream.push(b"a ST").text == "a "
    assert stream.push(b"AR").text == "STAR"


def test_the_stop_text_that_is_complete_first_wins():
    assert feed([b"xxbcab"], ["ab", "bc"]) == ("xx", "bc")
    assert feed([b"xabb"], ["abb", "b"]) == ("xa", "b")


@given(
    st.text("ab\n", max_size=20), st.lists(st.text("ab\n", min_size=1, max_size=3), min_size=1, max_size=3)
)
def test_stop_texts_cut_wherever_tokens_end(text, stops):
    data = text.encode()
    ends = [(text.find(s) + len(s), -len(s)) for s in stops if s in text]
    expected = text[: sum(min(ends))] if ends else text
    rng = random.Random(len(text))
    pieces, at = [], 0
    while at < len(data):
        n = rng.randint(1, 3)
        pieces.append(data[at : at + n])
        at += n
    assert feed(pieces or [b""], stops)[0] == expected


@pytest.mark.parametrize("stop", ["€", "x€"])
def test_a_fork_goes_its_own_way(stop):
    stream = TextStream([stop])
    stream.push(b"ab x" + "€".encode()[:1])
    copy = stream.fork()
    assert copy.push("€".encode()[1:]).stop == stop
    assert stream.push(b"z", final=True).stop is None
