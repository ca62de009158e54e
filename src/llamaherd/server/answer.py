"""One response, whole or as a stream, from the events of one or several generations."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias

from fastapi import Request
from starlette.responses import Response

from ..errors import LlamaherdError
from ..types import Failed, Finished, GenerationRequest
from . import schema
from .choices import ChatChoice, TextChoice, usage_of
from .errors import error_body
from .merge import merged
from .pool import Served
from .responses import JSON, EventStream, sse, until_gone
from .state import House

__all__ = ["Answer", "Choice"]

Choice: TypeAlias = ChatChoice | TextChoice


class Answer:
    """Turns the events of one or several generations into one response."""

    def __init__(
        self,
        kind: str,
        number: str,
        served: Served,
        body: schema._Generation,
        choices: Sequence[Choice],
        keep: int | None = None,
    ) -> None:
        self._kind = kind
        self._served = served
        self._body = body
        self._choices = choices
        self._keep = keep
        self._envelope = {
            "id": number,
            "object": kind,
            "created": int(time.time()),
            "model": served.name,
            "system_fingerprint": None,
        }

    async def respond(
        self, request: Request, house: House, generations: Sequence[GenerationRequest]
    ) -> Response:
        """The response: a stream, or all at once. Errors before the first event are raised."""
        sources = [house.events(self._served, g) for g in generations]
        chunks = self._chunks(sources)
        if not self._body.streams:
            async with aclosing(chunks):
                finished = await until_gone(request, self._whole(chunks))
            return JSON(self._complete(finished))
        try:
            first = await until_gone(request, anext(chunks))
        except BaseException:
            await chunks.aclose()
            raise
        return EventStream(self._stream(first, chunks))

    async def _chunks(
        self, sources: Sequence[AsyncGenerator[Any, None]]
    ) -> AsyncGenerator[list[dict[str, Any]] | Finished, None]:
        """Choices' chunks as they come, and each generation's end. Raises the error of one that failed."""
        per = len(self._choices) // len(sources)
        async with aclosing(merged(sources)) as events:
            async for k, event in events:
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Finished):
                    chunks: list[dict[str, Any]] = []
                    for completion in event.completions:
                        choice = self._choices[k * per + completion.index]
                        chunks += choice.cut(completion)
                        if isinstance(choice, TextChoice):
                            choice.score = completion.score
                    if chunks:
                        yield chunks
                    yield event
                    continue
                chunks = self._choices[k * per + event.index].push(event)
                if chunks:
                    yield chunks

    @staticmethod
    async def _whole(chunks: AsyncIterator[list[dict[str, Any]] | Finished]) -> list[Finished]:
        return [item async for item in chunks if isinstance(item, Finished)]

    def _complete(self, finished: list[Finished]) -> dict[str, Any]:
        choices = list(self._choices)
        if self._keep is not None and self._keep * len(finished) < len(choices):
            choices = self._best(choices, len(finished))
        return self._envelope | {"choices": [c.whole() for c in choices], "usage": usage_of(finished)}

    def _best(self, choices: list[Choice], n_prompts: int) -> list[Choice]:
        """The best of each prompt's choices, by log-probability per token."""
        assert self._keep is not None
        per = len(choices) // n_prompts
        kept: list[Choice] = []
        for k in range(n_prompts):
            own = choices[k * per : (k + 1) * per]
            own.sort(key=lambda c: -getattr(c, "score", 0.0))
            kept += own[: self._keep]
        for i, choice in enumerate(kept):
            choice.index = i
        return kept

    async def _stream(
        self,
        first: list[dict[str, Any]] | Finished,
        rest: AsyncGenerator[list[dict[str, Any]] | Finished, None],
    ) -> AsyncGenerator[bytes, None]:
        finished: list[Finished] = []
        async with aclosing(rest):
            try:
                if self._kind == "chat.completion":
                    starts = [
                        {
                            "index": c.index,
                            "delta": {"role": "assistant", "content": ""},
                            "finish_reason": None,
                        }
                        for c in self._choices
                    ]
                    yield b"".join(self._event([start]) for start in starts)
                yield self._pieces(first, finished)
                async for item in rest:
                    piece = self._pieces(item, finished)
                    if piece:
                        yield piece
                if self._body.wants_usage:
                    yield self._event([], usage=usage_of(finished))
            except LlamaherdError as error:
                yield sse(error_body(error))
                return
            yield b"data: [DONE]\n\n"

    def _pieces(self, item: list[dict[str, Any]] | Finished, finished: list[Finished]) -> bytes:
        if isinstance(item, Finished):
            finished.append(item)
            return b""
        return b"".join(self._event([chunk]) for chunk in item)

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = self._kind + ".chunk" if self._kind == "chat.completion" else self._kind
        if self._body.wants_usage:
            more.setdefault("usage", None)
        return sse(self._envelope | {"object": kind, "choices": choices} | more)
