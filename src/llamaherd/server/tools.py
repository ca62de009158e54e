"""Tool calls in a model's text: found as it comes, whatever form the model was trained on.

    Hermes, Qwen      <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    Llama 3.x         <|python_tag|>{"name": ..., "parameters": {...}}, or <function=name>{...}</function>
    Mistral           [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name{...}
    generic           the text is a JSON object, or a list of them, of either kind

Some models write the marker as a control token, which has no text: what is left is the generic form.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ToolCall", "ToolParser", "call_schema", "instructions"]

_MARKERS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function=")
_CLOSERS = ("</tool_call>", "</function>")
_AFTER = re.compile(r"(?:\s|;|,|</tool_call>|</function>)+")
_NAMED = re.compile(r"\s*([\w.-]{1,200})\s*(?:\[ARGS\]|\[CALL_ID\][\w-]*\[ARGS\]|>)?\s*(?=\{)")
_LONGEST_HEAD = 400


@dataclass(frozen=True)
class ToolCall:
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


class ToolParser:
    """Separates text from calls of known tools, piece by piece.

    A text that may yet become a call is held back until it is decided. What turns out to be none (other
    JSON, unknown names, a call that never ends) comes out as text.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self._start = True  # nothing but calls and spaces so far
        self._after = False  # right behind a call
        self._calling = False  # behind a marker
        self._raw = ""  # the marker, to be given back if no call follows
        self._scan = _Scan()

    def push(self, text: str) -> list[str | ToolCall]:
        """Add text; what became certain comes back."""
        self._held += text
        found: list[str | ToolCall] = []
        while self._held and self._step(found):
            pass
        return found

    def finish(self) -> list[str | ToolCall]:
        """No more text follows."""
        rest, self._held = self._raw + self._held, ""
        if self._after and any(c.startswith(rest) for c in _CLOSERS):
            return []
        return [rest] if rest.strip() or (rest and not self._start) else []

    def _step(self, found: list[str | ToolCall]) -> bool:
        """Decide about the beginning of what is held; False if more is needed."""
        if self._after:
            between = _AFTER.match(self._held)
            self._held = self._held[between.end() :] if between else self._held
            if any(c.startswith(self._held) for c in _CLOSERS):
                return False
            self._after = False
        if self._calling:
            return self._call(found)
        if self._start:
            stripped = self._held.lstrip()
            if not stripped:
                return False
            if stripped[0] in "{[" and not "[TOOL_CALLS]".startswith(stripped[:12]):
                self._begin("", stripped)
                return True
        return self._text(found)

    def _begin(self, marker: str, rest: str) -> None:
        self._calling, self._raw, self._held, self._scan = True, marker, rest, _Scan()

    def _text(self, found: list[str | ToolCall]) -> bool:
        hits = [(self._held.find(m), m) for m in _MARKERS]
        hits = [hit for hit in hits if hit[0] >= 0]
        if hits:
            at, marker = min(hits)
            self._emit(self._held[:at], found)
            self._begin(marker, self._held[at + len(marker) :])
            return True
        keep = max((n for m in _MARKERS for n in range(1, len(m)) if self._held.endswith(m[:n])), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        self._emit(text, found)
        return False

    def _emit(self, text: str, found: list[str | ToolCall]) -> None:
        if text and (text.strip() or not self._start):
            self._start = False
            found.append(text)

    def _call(self, found: list[str | ToolCall]) -> bool:
        held = self._held
        head = _NAMED.match(held) if self._raw else None
        name = head.group(1) if head else None
        body = held[head.end() :] if head else held.lstrip()
        if not head and body[:1] not in ("{", "["):
            if not body or (self._raw and len(held) < _LONGEST_HEAD and "{" not in held):
                return False  # a name may be on its way
            return self._give_back(found)
        end = self._scan.end(body)
        if end is None:
            return False
        calls = self._calls(body[:end], name)
        if not calls:
            return self._give_back(found, len(held) - len(body) + end)
        found.extend(calls)
        self._held = body[end:]
        self._calling, self._raw, self._start, self._after = False, "", True, True
        return True

    def _give_back(self, found: list[str | ToolCall], n: int | None = None) -> bool:
        """It was no call: emit the marker and n characters as text."""
        held = self._held
        n = len(held) if n is None else n
        text, self._held = self._raw + held[:n], held[n:]
        self._calling, self._raw = False, ""
        self._emit(text, found)
        self._start = False
        return bool(self._held)

    def _calls(self, text: str, name: str | None) -> list[ToolCall]:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return []
        if name is not None:
            known = name in self._names and isinstance(value, dict)
            return [ToolCall(name, _dump(value))] if known else []
        values = value if isinstance(value, list) else [value]
        calls = [self._one(v) for v in values]
        return [c for c in calls if c is not None] if all(calls) else []

    def _one(self, value: Any) -> ToolCall | None:
        if not isinstance(value, dict):
            return None
        if isinstance(value.get("function"), dict):
            value = value["function"]
        name = value.get("name")
        if not isinstance(name, str) or name not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):  # JSON within JSON
            return ToolCall(name, arguments)
        return ToolCall(name, _dump(arguments))


class _Scan:
    """Finds where a JSON object or list ends; looks at each character once."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._in_text = self._escaped = False

    def end(self, text: str) -> int | None:
        """The length of the value that ``text`` begins with, once it is whole. Text only ever grows."""
        for i in range(self._at, len(text)):
            c = text[i]
            if self._in_text:
                if self._escaped:
                    self._escaped = False
                elif c == "\\":
                    self._escaped = True
                elif c == '"':
                    self._in_text = False
            elif c == '"':
                self._in_text = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return i + 1
        self._at = len(text)
        return None


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def call_schema(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A JSON schema of a call of one of the tools, for when the model must make one."""
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    "arguments": tool["function"].get("parameters") or {"type": "object"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in tools
        ]
    }


def instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    """A system message about the tools, for models whose template knows of none."""
    functions = "\n".join(_dump(tool["function"]) for tool in tools)
    return (
        "You may call functions. Their signatures:\n"
        f"{functions}\n"
        'To call one, answer with nothing but a JSON object {"name": <name>, "arguments": <arguments>}.'
    )
