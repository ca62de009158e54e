"""Which replica a request goes to."""

from __future__ import annotations

from llamaherd.replicas.affinity import Affinity
from llamaherd.types import PromptPart

CHAT = "You are a helpful assistant. " * 20


def test_a_prompt_goes_where_its_beginning_went() -> None:
    affinity = Affinity()
    loads = {"a": 0, "b": 0, "c": 0}
    first = affinity.choose(CHAT, loads)
    other = affinity.choose("something else entirely, which is long enough " * 5, loads | {first: 1})
    assert other != first
    for turn in range(20):
        assert affinity.choose(CHAT + f"turn {turn} " * turn, loads) == first


def test_the_longest_known_beginning_wins() -> None:
    affinity = Affinity(slack=100)
    assert affinity.choose(CHAT, {"a": 0, "b": 1}) == "a"
    longer = CHAT + "and a long conversation " * 20
    assert affinity.choose(longer, {"b": 0}) == "b"
    assert affinity.choose(longer + "more " * 30, {"a": 0, "b": 50}) == "b"
    assert affinity.choose(CHAT, {"a": 0, "b": 50}) == "a"


def test_a_busy_replica_is_left_alone() -> None:
    affinity = Affinity(slack=4)
    assert affinity.choose(CHAT, {"a": 0, "b": 1}) == "a"
    assert affinity.choose(CHAT, {"a": 4, "b": 0}) == "a"
    assert affinity.choose(CHAT, {"a": 5, "b": 0}) == "b"


def test_unknown_prompts_go_to_the_idlest() -> None:
    affinity = Affinity()
    assert affinity.choose("short", {"a": 3, "b": 1, "c": 2}) == "b"
    assert affinity.choose([], {"a": 3, "b": 1}) == "b"


def test_tokens_and_parts_have_beginnings_too() -> None:
    affinity = Affinity()
    tokens = list(range(100))
    assert affinity.choose(tokens, {"a": 0, "b": 1}) == "a"
    assert affinity.choose([*tokens, 7, 8], {"a": 2, "b": 0}) == "a"
    assert affinity.choose([9, *tokens], {"a": 2, "b": 0}) == "b"
    parts = [PromptPart("<system>", True), PromptPart(CHAT, False)]
    assert affinity.choose(parts, {"a": 0, "b": 1}) == "a"
    assert affinity.choose([*parts, PromptPart("next turn" * 20, False)], {"a": 2, "b": 0}) == "a"


def test_what_is_forgotten_is_unknown() -> None:
    affinity = Affinity(remembered=4)
    assert affinity.choose(CHAT, {"a": 0, "b": 1}) == "a"
    affinity.forget("a")
    assert affinity.choose(CHAT, {"a": 2, "b": 0}) == "b"
    affinity.choose("another prompt, long enough for blocks " * 20, {"b": 0})
    assert affinity.choose(CHAT, {"a": 0, "b": 2}) == "a", "only the latest blocks are kept"
