"""Chat templates: from messages to a prompt in which only the template's own text can be control tokens.

A model's file carries a Jinja template that writes a conversation the way the model was trained on. It is
rendered in transformers' dialect, in a sandbox, with bounds on time and size. What users wrote is marked
before rendering, wherever it spells a control token (or half of one at its ends), so that afterwards the
stretches of theirs can be told from the template's: ``<|im_end|>`` typed by a user stays ten characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from jinja2 import Template, TemplateError, TemplateSyntaxError

from .errors import ChatTemplateError
from .jinja_dialect import MARKS, BoundExceededError, Dialect
from .types import PromptPart

__all__ = ["ChatTemplate", "Message"]

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}`` and whatever else the template reads (``tool_calls``, ...)."""

_ROLES = frozenset(
    {"system", "developer", "user", "assistant", "model", "tool", "function", "ipython", "environment"}
    | {"context", "documents", "tool_call", "tool_response", "observation"}
)
_REASONING = ("reasoning_content", "thinking", "reasoning")


class _Vocabulary(Protocol):
    @property
    def bos(self) -> int | None: ...
    @property
    def eos(self) -> int | None: ...
    @property
    def pad(self) -> int | None: ...
    def control_texts(self) -> dict[str, int]: ...
    def piece(self, token: int, *, special: bool = False) -> bytes: ...


class _Model(Protocol):
    @property
    def vocabulary(self) -> _Vocabulary: ...
    def chat_template(self, name: str | None = None) -> str | None: ...


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja template; None or empty raises.
        control_texts: the texts of the model's control tokens, which user text must never become.
        variables: what the template may read beside the messages: ``bos_token``, ``eos_token``, ...

    Raises:
        ChatTemplateError: there is no template, or it does not compile.
    """

    def __init__(
        self,
        source: str | None,
        control_texts: Iterable[str],
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        if not source:
            raise ChatTemplateError(
                "this model's file has no chat template; give the prompt as text, or use an instruct model"
            )
        self.source = source
        self.variables = dict(variables or {})
        self._controls = _Controls(control_texts)
        try:
            self._template: Template = Dialect().from_string(source)
        except TemplateSyntaxError as error:
            raise _error(f"does not compile: {error.message} (line {error.lineno})") from error
        except (TemplateError, RecursionError) as error:
            raise _error(f"does not compile: {error}") from error

    @classmethod
    def of(cls, model: _Model, name: str | None = None) -> ChatTemplate:
        """The template that a model's file carries (or the one of that name).

        Raises:
            ChatTemplateError: it carries none, or one that does not compile.
        """
        vocabulary = model.vocabulary
        variables = {}
        for key in ("bos", "eos", "pad"):
            token = getattr(vocabulary, key)
            if token is not None:
                variables[f"{key}_token"] = vocabulary.piece(token, special=True).decode("utf-8", "replace")
        return cls(model.chat_template(name), vocabulary.control_texts(), variables)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> tuple[PromptPart, ...]:
        """The conversation as prompt parts; control tokens are parsed only where the template wrote them.

        A template that cuts pieces out of the middle of user text could still join what is left into a
        control token's text; none that is in use does.

        Args:
            messages: the conversation, oldest first.
            tools: JSON schemas of functions that the model may call.
            documents: ``{"title": ..., "text": ...}`` for templates that take them.
            add_generation_prompt: end with the beginning of an assistant's turn.
            variables: more for the template to read (``enable_thinking``, ...).

        Raises:
            ChatTemplateError: the template refused these messages (its message is kept), failed on them,
                or ran too long or too large.
        """
        mark = self._controls.mark
        marked = [self._message(message, i) for i, message in enumerate(messages)]
        values = {
            **self.variables,
            **mark(variables),
            "messages": marked,
            "tools": None if tools is None else mark(tools),
            "documents": None if documents is None else mark(documents),
            "add_generation_prompt": add_generation_prompt,
        }
        environment = self._template.environment
        assert isinstance(environment, Dialect)
        try:
            rendered = environment.render_bounded(self._template, values)
        except BoundExceededError as error:
            raise _error(f"was stopped: {error}") from error
        except TemplateError as error:
            # raise_exception's message, or jinja2's own: written for the caller either way
            raise _error(f"refuses these messages: {error.message or error}") from error
        except Exception as error:  # a template is a program: it can fail in any way a program can
            raise _error(f"failed on these messages: {type(error).__name__}: {error}") from error
        return self._controls.split(rendered)

    def text(self, messages: Sequence[Message], **options: Any) -> str:
        """render() as one text, to look at. It no longer tells the user's text from the template's."""
        return "".join(part.text for part in self.render(messages, **options))

    def _message(self, message: Message, index: int) -> dict[str, Any]:
        """A message as templates expect it: marked, without nulls, its reasoning under every usual name."""
        if not isinstance(message, Mapping):
            raise ChatTemplateError(f"message {index} is no mapping of role and content: {message!r:.60}")
        role = message.get("role")
        if not isinstance(role, str):
            raise ChatTemplateError(f"message {index} has the role {role!r:.60}; roles are texts like 'user'")
        if role not in _ROLES and self._controls.spells(role):
            # templates build control tokens of roles: '<|' + role + '|>'
            raise ChatTemplateError(f"message {index}: {role!r} is no role, but part of a control token")
        fields: dict[str, Any] = {k: v for k, v in message.items() if v is not None}
        reasoning = next((fields[key] for key in _REASONING if key in fields), None)
        if reasoning is not None:
            fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
        marked: dict[str, Any] = self._controls.mark(fields)
        return marked


def _error(what: str) -> ChatTemplateError:
    return ChatTemplateError(_unmarked(f"the model's chat template {what}"))


def _unmarked(text: str) -> str:
    return text.translate(dict.fromkeys(map(ord, MARKS)))


_CUT, _NEXT = MARKS[0], MARKS[1]  # what ends at _CUT, or begins at _NEXT, is no control token


class _Controls:
    """The control tokens' texts: marks them in user text, and finds the template's own afterwards."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = sorted({t for t in texts if t}, key=lambda t: (-len(t), t))
        any_text = "|".join(map(re.escape, self._texts)) or "(?!)"
        prefixes = {t[:i] for t in self._texts for i in range(1, len(t))}
        suffixes = {t[i:] for t in self._texts for i in range(1, len(t))}
        self._starts = re.compile(f"(?=(?:{any_text}))(.)", re.DOTALL)
        self._at_end = re.compile(f"(?={_any(prefixes)}\\Z)")
        self._at_start = re.compile(f"\\A{_any(suffixes)}")
        self._own = re.compile(f"(?<!{_NEXT})(?:{any_text})(?!{_CUT})")

    def spells(self, role: str) -> bool:
        return any(role in text for text in self._texts)

    def mark(self, value: Any) -> Any:
        """A copy of JSON-like data with marks in its texts, made of plain types only."""
        if isinstance(value, str):
            return self._mark_text(str(value))
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, tuple):
            return tuple(self.mark(item) for item in value)
        if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
            return [self.mark(item) for item in value]
        return f"<{type(value).__name__}>"  # a template gets no objects to play with

    def _mark_text(self, text: str) -> str:
        text = text.translate(dict.fromkeys(map(ord, MARKS), "\ufffd"))
        text = self._starts.sub(rf"\1{_CUT}", text)
        # halves at the ends, which the template's own text could complete; the marks are outside of them,
        # so that a template's startswith() and endswith() see what they look for
        text = self._at_start.sub(rf"\g<0>{_CUT}", text, count=1)
        return self._at_end.sub(_NEXT, text, count=1)

    def split(self, rendered: str) -> tuple[PromptPart, ...]:
        """Parts: between two of the template's control tokens, a stretch with a mark is plain text.

        A stretch goes whole, since tokenizers treat the beginning of a text in their own ways.
        """
        parts: list[PromptPart] = []
        own = ""
        end = 0
        for match in self._own.finditer(rendered):
            own = self._stretch(rendered[end : match.start()], own, parts) + match.group()
            end = match.end()
        own = self._stretch(rendered[end:], own, parts)
        if own or not parts:
            parts.append(PromptPart(own, parse_special=True))
        return tuple(parts)

    @staticmethod
    def _stretch(text: str, own: str, parts: list[PromptPart]) -> str:
        """Join a stretch without a mark to the template's own text; make one with a mark its own part."""
        if _CUT not in text and _NEXT not in text:
            return own + text
        if own:
            parts.append(PromptPart(own, parse_special=True))
        parts.append(PromptPart(_unmarked(text), parse_special=False))
        return ""


def _any(texts: Iterable[str]) -> str:
    """A pattern for any of the texts, the longest first."""
    alternatives = "|".join(re.escape(t) for t in sorted(texts, key=lambda t: (-len(t), t)))
    return f"(?:{alternatives or '(?!)'})"
