"""OpenAI's messages and tools as a prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from ..errors import InvalidParameterError
from ..types import PromptPart
from .pool import Served
from .schema import ChatMessage, ChatRequest, NamedTool
from .tools import instructions

__all__ = ["forced_tools", "offered_tools", "render"]

_LARGE = 50_000  # characters; longer conversations are rendered beside the event loop


def offered_tools(body: ChatRequest) -> list[dict[str, Any]]:
    """The tools that the model is told of."""
    if not body.tools or body.tool_choice == "none":
        return []
    return [tool.model_dump(exclude_none=True) for tool in body.tools]


def forced_tools(body: ChatRequest, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools of which one must be called; none if the model may choose.

    Raises:
        InvalidParameterError: tool_choice names a tool that is not there.
    """
    choice = body.tool_choice
    if choice == "required":
        if not tools:
            raise InvalidParameterError("tool_choice", "required", "it needs tools")
        return list(tools)
    if isinstance(choice, NamedTool):
        chosen = [t for t in tools if t["function"]["name"] == choice.function.name]
        if not chosen:
            raise InvalidParameterError(
                "tool_choice", choice.function.name[:200], "it names one of the tools"
            )
        return chosen
    return []


async def render(served: Served, body: ChatRequest) -> tuple[PromptPart, ...]:
    """The prompt of a conversation, by the model's own chat template.

    Raises:
        ChatTemplateError: there is no template, or it refuses these messages.
        InvalidParameterError: a message holds something else than text.
    """
    tools = offered_tools(body)
    template = served.template(tools=bool(tools))
    messages = [_message(m, i) for i, m in enumerate(body.messages)]
    if tools and "tools" not in template.source:
        messages, tools = _with_instructions(messages, tools), []
    options = dict(body.chat_template_kwargs or {})
    for own in ("messages", "tools", "documents", "add_generation_prompt", "self"):
        options.pop(own, None)

    def work() -> tuple[PromptPart, ...]:
        return template.render(messages, tools=tools or None, **options)

    size = sum(len(m["content"]) for m in messages if isinstance(m.get("content"), str))
    if size > _LARGE or len(messages) > 500:
        return await asyncio.to_thread(work)
    return work()


def _message(message: ChatMessage, index: int) -> dict[str, Any]:
    fields = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        texts = []
        for part in message.content:
            if part.type != "text" or part.text is None:
                raise InvalidParameterError(
                    f"messages.{index}.content",
                    part.type[:100],
                    "parts of the type 'text'; others are not understood",
                )
            texts.append(part.text)
        fields["content"] = "\n".join(texts)
    if message.tool_calls:
        fields["tool_calls"] = [_with_parsed_arguments(call) for call in message.tool_calls]
        fields.setdefault("content", "")
    return fields


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """OpenAI writes arguments as text, templates read them as data."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return call | {"function": function | {"arguments": arguments}}


def _with_instructions(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tell of the tools in the system message; show calls and results as text."""
    told = instructions(tools)
    shown = []
    for message in messages:
        if message["role"] == "tool":
            shown.append({"role": "user", "content": f"Result: {message.get('content', '')}"})
        elif message.get("tool_calls"):
            calls = [c.get("function", {}) for c in message["tool_calls"]]
            text = "\n".join(json.dumps(c, ensure_ascii=False) for c in calls)
            shown.append({"role": "assistant", "content": (message.get("content") or "") + text})
        else:
            shown.append(message)
    if shown and shown[0]["role"] == "system":
        first = shown[0] | {"content": f"{shown[0].get('content', '')}\n\n{told}"}
        return [first, *shown[1:]]
    return [{"role": "system", "content": told}, *shown]
