"""Many suggestions for one prompt, over HTTP."""

from __future__ import annotations

from collections.abc import Generator
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from ..errors import InvalidParameterError
from ..suggestions import DEFAULT_SAMPLING, suggesting
from ..types import Finished, GenerationRequest, Prompt, Suggestion
from . import chat_prompt, schema
from .pool import Served
from .responses import JSON, until_gone
from .state import House, house_of

__all__ = ["drive", "router"]

router = APIRouter()


class SuggestionRequest(schema._Body):
    """``POST /v1/suggestions``: a text to go on from, or a conversation to answer."""

    prompt: Annotated[str, Field(max_length=16_000_000)] | None = None
    messages: Annotated[list[schema.ChatMessage], Field(min_length=1)] | None = None
    n: int = Field(8, ge=1, le=64)
    max_tokens: int = Field(64, ge=1, le=4096)
    temperature: float | None = Field(None, gt=0, le=100)
    seed: int | None = None
    stop: list[str] = Field(default_factory=list, max_length=16)
    beam: bool = False


async def drive(
    house: House, served: Served, asking: Generator[GenerationRequest, Finished, list[Suggestion]]
) -> list[Suggestion]:
    """Run what suggesting() asks for. Raises the error of a request that failed."""
    request = next(asking)
    while True:
        finished = await house.finish(served, request)
        try:
            request = asking.send(finished)
        except StopIteration as end:
            suggestions: list[Suggestion] = end.value
            return suggestions


@router.post("/v1/suggestions", summary="Many distinct ways to go on")
async def suggestions(request: Request, body: SuggestionRequest) -> Response:
    """Distinct continuations, best first by log-probability per token; one prefill for all of them."""
    house = house_of(request)
    served = await until_gone(request, house.pool.get(body.model))
    prompt = await _prompt(served, body)
    sampling = DEFAULT_SAMPLING
    if body.temperature is not None:
        sampling = sampling.replace(temperature=body.temperature)
    if body.seed is not None:
        sampling = sampling.replace(seed=body.seed % 2**32)
    asking = suggesting(
        prompt,
        body.n,
        body.max_tokens,
        sampling=sampling,
        beam=body.beam,
        stop=[s for s in body.stop if s],
        client=request.client.host if request.client else "",
    )
    found = await until_gone(request, drive(house, served, asking))
    return JSON({"model": served.name, "suggestions": [_shown(s) for s in found]})


async def _prompt(served: Served, body: SuggestionRequest) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidParameterError("prompt", body.prompt, "exactly one of prompt and messages")
    if body.messages is None:
        return body.prompt or ""
    chat = schema.ChatRequest.model_validate({"messages": body.messages})
    return await chat_prompt.render(served, chat)


def _shown(suggestion: Suggestion) -> dict[str, Any]:
    return {
        "text": suggestion.text,
        "logprob": suggestion.logprob,
        "score": suggestion.score,
        "tokens": len(suggestion.tokens),
        "finish_reason": suggestion.finish_reason,
    }
