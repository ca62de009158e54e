"""Jinja as chat templates are written in it: transformers' dialect, sandboxed and bounded.

The dialect is that of transformers' ``apply_chat_template``: blocks are trimmed, ``break`` and ``continue``
work, ``{% generation %}`` passes its body through, ``tojson`` is plain ``json.dumps``. Templates come with
model files, so they are other people's programs: they see plain data only, and stop at a time limit (looked
at in every loop and call), a size limit of texts and of the output, and Python's own recursion limit.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

__all__ = ["MARKS", "BoundExceededError", "Dialect"]

MARKS = "\ufdd0\ufdd1"
"""Mark user text in a rendering: Unicode noncharacters, which no text should hold."""

MAX_SECONDS = 5.0
MAX_CHARACTERS = 32_000_000
_MAX_WIDTH = 10_000
_ITEM = 32  # a list's item weighs as much as this many characters
_deadline: ContextVar[float | None] = ContextVar("chat template deadline", default=None)


class BoundExceededError(Exception):
    """A template ran too long or grew too large."""


def _check_time() -> None:
    deadline = _deadline.get()
    if deadline is not None and time.monotonic() > deadline:
        raise BoundExceededError(f"it ran for more than {MAX_SECONDS:g} s")


def _check_size(size: float) -> None:
    if size > MAX_CHARACTERS:
        raise BoundExceededError(f"it made a text of more than {MAX_CHARACTERS} characters")


def _looped(items: Iterable[Any]) -> Iterable[Any]:
    """The items of a for loop; containers stay what they are, so that loop.length costs no copy."""
    return _Watched(items) if isinstance(items, (list, tuple, dict, str, range)) else _watch(items)


def _watch(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _check_time()
        yield item


class _Watched:
    def __init__(self, items: Any) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return _watch(self._items)

    def __len__(self) -> int:
        return len(self._items)


def _concatenated(values: Iterable[Any]) -> str:
    texts = [str(v) for v in values]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


class _Generation(Extension):
    """``{% generation %}`` marks what an assistant wrote; rendered, it is its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_pass"), [], [], body).set_lineno(line)

    def _pass(self, caller: Any) -> str:
        return str(caller())


class _Namespace(Namespace):
    """Refuses underscored names, the door to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}; rename it")


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain json.dumps; unlike Jinja's, it does not escape for HTML."""
    if isinstance(indent, int):
        _check_width(indent)
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:  # a mark must stay a mark
        text = re.sub(f"[^\\x00-\\x7f{MARKS}]", lambda m: json.dumps(m.group())[1:-1], text)
    return text


def _check_width(*values: Any) -> None:
    for value in values:
        if isinstance(value, (int, float)) and abs(value) > _MAX_WIDTH:
            raise BoundExceededError(f"it asked for a width or count of {value}")


def _check_format(text: Any) -> None:
    if isinstance(text, str) and re.search(r"\d{5,}|%[^a-zA-Z%]*\*|\{[^}]*:[^}]*\{", text):
        raise BoundExceededError("it formats with too large a width, or one computed")


class Dialect(ImmutableSandboxedEnvironment):
    """The environment that chat templates are compiled and rendered in."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.filters["_looped"] = _looped
        self.filters["_concatenated"] = _concatenated
        for name in ("center", "indent", "format"):
            self.filters[name] = _narrow(self.filters[name])
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
        self.globals["namespace"] = _Namespace

    def render_bounded(self, template: jinja2.Template, values: Mapping[str, Any]) -> str:
        """Render, or raise BoundExceededError."""
        token = _deadline.set(time.monotonic() + MAX_SECONDS)
        pieces: list[str] = []
        size = 0
        try:
            for piece in template.generate(values):
                _check_time()
                size += len(piece)
                _check_size(size)
                pieces.append(piece)
        finally:
            _deadline.reset(token)
        return "".join(pieces)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse, and put the watches into every loop and concatenation."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _filtered(loop.iter, "_looped")
        _replace_concatenations(tree)
        return tree

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Every call a template makes: looks at the time, and at what could make a text enormous."""
        _check_time()
        receiver = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(receiver, str):
            _check_width(*args)
            name = getattr(__obj, "__name__", "")
            if name in ("format", "format_map"):
                _check_format(receiver)
            elif name == "replace" and len(args) > 1:
                _check_size(len(receiver) + receiver.count(str(args[0])) * len(str(args[1])))
            elif name == "join" and args and isinstance(args[0], (list, tuple)):
                _check_size(len(args[0]) * len(receiver))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic whose result could be enormous."""
        if operator == "*":
            for text, count in ((left, right), (right, left)):
                if isinstance(text, (str, list, tuple)) and isinstance(count, int):
                    _check_size(len(text) * count * (1 if isinstance(text, str) else _ITEM))
        elif operator == "**":
            _check_width(left, right)
        elif operator == "%":
            _check_format(left)
        elif isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            _check_size(len(left) + len(right))
        if isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
            bits = left.bit_length() * (right if operator == "**" else 1) + right.bit_length()
            _check_size(bits)
        return super().call_binop(context, operator, left, right)


def _narrow(function: Any) -> Any:
    """A filter that refuses enormous widths."""

    def narrow(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_format(value)
        _check_width(*args, *kwargs.values())
        return function(value, *args, **kwargs)

    return narrow


def _filtered(node: nodes.Node, name: str) -> nodes.Expr:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


def _replace_concatenations(node: nodes.Node) -> None:
    """Every ``a ~ b`` becomes a filter that looks at the size first."""
    for field, value in node.iter_fields():
        if isinstance(value, list):
            value[:] = [_replaced(v) for v in value]
        elif isinstance(value, nodes.Node):
            setattr(node, field, _replaced(value))


def _replaced(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _replace_concatenations(value)
    if isinstance(value, nodes.Concat):
        return _filtered(nodes.List(value.nodes, lineno=value.lineno), "_concatenated")
    return value
