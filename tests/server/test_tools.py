from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaherd.server.tools import ToolCall, ToolParser

NAMES = {"weather", "time"}
CALL = '{"name": "weather", "arguments": {"city": "Paris {x} \\"q\\" ]"}}'
PARAMETERS = '{"name": "time", "parameters": {"zone": "UTC"}}'


def parse(text: str, cuts: list[int] | None = None) -> tuple[str, list[tuple[str, Any]]]:
    parser = ToolParser(NAMES)
    bounds = [0, *sorted(c % (len(text) + 1) for c in cuts or []), len(text)]
    found: list[str | ToolCall] = []
    for start, end in itertools.pairwise(bounds):
        found += parser.push(text[start:end])
    found += parser.finish()
    said = "".join(f for f in found if isinstance(f, str))
    return said, [(f.name, json.loads(f.arguments)) for f in found if isinstance(f, ToolCall)]


WEATHER = ("weather", {"city": 'Paris {x} "q" ]'})
TIME = ("time", {"zone": "UTC"})

FORMS = [
    (f"<tool_call>\n{CALL}\n</tool_call>", "", [WEATHER]),
    (
        f"I look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{PARAMETERS}</tool_call>",
        "I look.\n",
        [WEATHER, TIME],
    ),
    (f"<|python_tag|>{PARAMETERS}", "", [TIME]),
    (f"{PARAMETERS}; {CALL}", "", [TIME, WEATHER]),
    ('<function=time>{"zone": "UTC"}</function>', "", [TIME]),
    (f"[TOOL_CALLS][{CALL}, {PARAMETERS}]", "", [WEATHER, TIME]),
    (f"[TOOL_CALLS] [{CALL}]", "", [WEATHER]),
    ('[TOOL_CALLS]time{"zone": "UTC"}', "", [TIME]),
    ('[TOOL_CALLS]time[ARGS]{"zone": "UTC"}', "", [TIME]),
    (f"[{CALL}]", "", [WEATHER]),
    (f"  \n{CALL}", "", [WEATHER]),
    ('{"type": "function", "function": ' + PARAMETERS + "}", "", [TIME]),
    ('{"name": "time", "arguments": "{\\"zone\\": \\"UTC\\"}"}', "", [TIME]),
    ("Just text, with <b>tags</b> and [lists].", "Just text, with <b>tags</b> and [lists].", []),
    ('{"name": "unknown", "arguments": {}}', '{"name": "unknown", "arguments": {}}', []),
    ('{"answer": 42}', '{"answer": 42}', []),
    ("[1, 2] is a list", "[1, 2] is a list", []),
    ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
    ('<tool_call>{"name": "weather", "argu', '<tool_call>{"name": "weather", "argu', []),
    ("{not json}", "{not json}", []),
    ("a < b and <tool", "a < b and <tool", []),
]


@pytest.mark.parametrize(("text", "said", "calls"), FORMS)
def test_forms(text: str, said: str, calls: list[Any]) -> None:
    assert parse(text) == (said, calls)


@given(st.sampled_from(FORMS), st.lists(st.integers(0, 400), max_size=20))
def test_it_does_not_matter_how_a_text_comes(form: tuple[str, str, list[Any]], cuts: list[int]) -> None:
    assert parse(form[0], cuts) == (form[1], form[2])


@given(
    st.text(alphabet='{}[]"<>|tool_caTOL=:, \\name', max_size=60), st.lists(st.integers(0, 60), max_size=10)
)
def test_without_calls_nothing_of_a_text_is_lost(text: str, cuts: list[int]) -> None:
    said, calls = parse(text, cuts)
    assert not calls
    assert said.strip() == text.strip() or said == text


def test_text_comes_as_soon_as_it_is_certain() -> None:
    parser = ToolParser(NAMES)
    assert parser.push("Hello <") == ["Hello "]
    assert parser.push("b>") == ["<b>"]
    assert parser.push("<tool_call>") == []
    assert parser.push(CALL[:20]) == []
    (call,) = parser.push(CALL[20:])
    assert isinstance(call, ToolCall)
    assert call.name == "weather"
