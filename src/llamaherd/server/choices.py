"""From events to OpenAI's choices: deltas of a stream, and the whole of an answer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..types import Completion, Finished, Logprob, Token, Usage
from .tools import ToolCall, ToolParser

__all__ = ["ChatChoice", "TextChoice", "usage_of"]


def usage_of(finished: list[Finished]) -> dict[str, Any]:
    """OpenAI's usage of one or several requests."""
    usages: list[Usage] = [f.usage for f in finished]
    prompt = sum(u.prompt_tokens for u in usages)
    completion = sum(u.completion_tokens for u in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in usages)},
    }


def _reason(reason: str | None) -> str | None:
    """OpenAI's finish_reason: what was cut short by time ends as by length."""
    return {"cancelled": "length", "deadline": "length"}.get(reason or "", reason)


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)


def _text_of(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def _shown(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _text_of(piece), "logprob": _finite(logprob), "bytes": list(piece)}


class ChatChoice:
    """One choice of a chat completion."""

    def __init__(self, index: int, *, logprobs: bool, tools: Collection[str] | None) -> None:
        self.index = index
        self._logprobs = logprobs
        self._parser = ToolParser(tools) if tools is not None else None
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._shown: list[dict[str, Any]] = []
        self._finish: str | None = None
        self._seen = 0  # characters of the model's text

    def push(self, token: Token) -> list[dict[str, Any]]:
        """Take in a token; the stream's chunks (choices without their envelope) that it makes."""
        self._seen += len(token.text)
        deltas = self._deltas(token.text, final=token.finish_reason is not None)
        shown = None
        if self._logprobs:
            entry = _shown(token.piece, token.logprob)
            entry["top_logprobs"] = [_shown(t.piece, t.logprob) for t in token.top_logprobs]
            self._shown.append(entry)
            shown = {"content": [entry], "refusal": None}
            deltas = deltas or [{}]
        chunks = [self._chunk(delta, None, shown if i == 0 else None) for i, delta in enumerate(deltas)]
        if token.finish_reason is not None:
            chunks.append(self._chunk({}, self._end(token.finish_reason)))
        return chunks

    def cut(self, completion: Completion) -> list[dict[str, Any]]:
        """The choice has ended; if without a last token (deadline), there may be text that was held back."""
        if self._finish is not None:
            return []
        deltas = self._deltas(completion.text[self._seen :], final=True)
        return [*(self._chunk(d, None) for d in deltas), self._chunk({}, self._end(completion.finish_reason))]

    def _end(self, reason: str) -> str:
        self._finish = _reason(reason) or "stop"
        if self._calls and self._finish == "stop":
            self._finish = "tool_calls"
        return self._finish

    def _deltas(self, text: str, *, final: bool) -> list[dict[str, Any]]:
        if self._parser is None:
            if not text:
                return []
            self._content.append(text)
            return [{"content": text}]
        found = self._parser.push(text)
        if final:
            found += self._parser.finish()
        deltas: list[dict[str, Any]] = []
        for item in found:
            if isinstance(item, str):
                self._content.append(item)
                deltas.append({"content": item})
            else:
                deltas.append({"tool_calls": [{"index": len(self._calls), **_call(item)}]})
                self._calls.append(item)
        return deltas

    def _chunk(
        self, delta: dict[str, Any], reason: str | None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def whole(self) -> dict[str, Any]:
        """The choice of an answer that is no stream."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = [_call(c) for c in self._calls]
        logprobs = {"content": self._shown, "refusal": None} if self._logprobs else None
        return {
            "index": self.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._finish or "length",
        }


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


class TextChoice:
    """One choice of a (legacy) completion.

    Args:
        echo: text to begin with.
        logprobs: how many alternatives to show with each token; None shows nothing.
    """

    def __init__(self, index: int, *, logprobs: int | None, echo: str = "") -> None:
        self.index = index
        self._logprobs = logprobs
        self._text: list[str] = [echo] if echo else []
        self._length = len(echo)
        self._echo = echo
        self._shown = _no_logprobs()
        self._finish: str | None = None
        self._seen = 0  # characters of the model's text
        self.score = 0.0

    def push(self, token: Token) -> list[dict[str, Any]]:
        """Take in a token; the stream's chunks that it makes."""
        self._seen += len(token.text)
        shown = None
        if self._logprobs is not None:
            shown = _no_logprobs()
            for target in (shown, self._shown):
                target["tokens"].append(_text_of(token.piece))
                target["token_logprobs"].append(_finite(token.logprob))
                target["top_logprobs"].append(_top(token.top_logprobs))
                target["text_offset"].append(self._length)
            self._length += len(_text_of(token.piece))
        text, self._echo = self._echo + token.text, ""
        if token.text:
            self._text.append(token.text)
        reason = None
        if token.finish_reason is not None:
            reason = self._finish = _reason(token.finish_reason)
        if not text and reason is None and shown is None:
            return []
        return [self._chunk(text, reason, shown)]

    def cut(self, completion: Completion) -> list[dict[str, Any]]:
        """The choice has ended; if without a last token (deadline), there may be text that was held back."""
        if self._finish is not None:
            return []
        self._finish = _reason(completion.finish_reason)
        text = completion.text[self._seen :]
        self._text.append(text)
        return [self._chunk(text, self._finish, None)]

    def _chunk(self, text: str, reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"text": text, "index": self.index, "logprobs": logprobs, "finish_reason": reason}

    def whole(self) -> dict[str, Any]:
        """The choice of an answer that is no stream."""
        shown = self._shown if self._logprobs is not None else None
        return self._chunk("".join(self._text), self._finish or "length", shown)


def _no_logprobs() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _top(top: tuple[Logprob, ...]) -> dict[str, float]:
    return {_text_of(t.piece): _finite(t.logprob) for t in top}
