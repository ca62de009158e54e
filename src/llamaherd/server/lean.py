"""The protocols of Lean's clients: llmstep's and LeanCopilot's, as their stock versions speak them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from ..config import SamplingConfig
from ..errors import InvalidParameterError
from ..lean import LeanPreset, lean_preset
from ..suggestions import suggesting
from ..types import Suggestion
from .pool import Served
from .responses import JSON, until_gone
from .state import House, house_of
from .suggest import drive

__all__ = ["router"]

router = APIRouter()
T = TypeVar("T")

_JOIN = "[SUGGESTION]"
"""llmstep's client joins suggestions by this; none may contain it."""
_Text = Annotated[str, Field(max_length=4_000_000)]
_FEWEST_SCORE = 1e-12


class LlmstepRequest(BaseModel):
    """What llmstep's client sends, and what more ours understands."""

    model_config = ConfigDict(extra="allow")

    tactic_state: _Text
    prefix: _Text = ""
    context: _Text = ""
    n: int = Field(10, ge=1, le=64)
    max_tokens: int = Field(128, ge=1, le=4096)
    temperature: float = Field(0.5, gt=0, le=100)
    preset: str | None = None
    model: str | None = None
    seed: int | None = None


class GenerateRequest(BaseModel):
    """What LeanCopilot's external generator is sent, and what more ours understands."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(max_length=500)
    input: _Text
    prefix: _Text | None = None
    n: int = Field(16, ge=1, le=64)
    max_tokens: int = Field(128, ge=1, le=4096)
    temperature: float = Field(0.7, gt=0, le=100)
    preset: str | None = None
    seed: int | None = None


class EncodeRequest(BaseModel):
    """What LeanCopilot's external encoder is sent."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(max_length=500)
    input: _Text


class Superseded(Exception):  # noqa: N818 (nothing is wrong)
    """A newer request of the same client, about the same place, has come."""


class _Newest:
    """Lets only the newest request of each place run."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, ...], asyncio.Event] = {}

    async def run(self, place: tuple[str, ...], work: Coroutine[Any, Any, T]) -> T:
        """Await work, unless a newer one of the same place comes: then cancel it. Raises Superseded."""
        older = self._running.get(place)
        if older is not None:
            older.set()
        newer = self._running[place] = asyncio.Event()
        working = asyncio.ensure_future(work)
        waiting = asyncio.ensure_future(newer.wait())
        try:
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise Superseded
        finally:
            for task in (working, waiting):
                task.cancel()
            await asyncio.gather(working, waiting, return_exceptions=True)
            if self._running.get(place) is newer:
                del self._running[place]


_newest = _Newest()


@router.post("/", summary="llmstep: tactics for a goal")
async def llmstep(request: Request, body: LlmstepRequest) -> Response:
    """Suggestions, each the prefix and what was generated; best first."""
    house = house_of(request)
    served = await until_gone(request, house.pool.get(body.model))
    asked = _suggest(request, house, served, body, body.tactic_state, body.prefix, body.context)
    client = request.client.host if request.client else ""
    try:
        # the same place in the same file: the user has typed on
        found = await until_gone(request, _newest.run((client, body.context), asked))
    except Superseded:
        return JSON({"suggestions": [], "error": "a newer request of this client came"}, status_code=409)
    preset = _preset(house, served, body.preset)
    texts = [preset.shown(s.text, body.prefix) for s in found]
    return JSON({"suggestions": [t for t in texts if _JOIN not in t]})


@router.post("/generate", summary="LeanCopilot: tactics for a goal, with scores")
async def generate(request: Request, body: GenerateRequest) -> Response:
    """Outputs with scores in (0, 1]: the geometric mean of their tokens' probabilities."""
    house = house_of(request)
    served = await until_gone(request, house.pool.get(body.name))
    prefix = body.prefix or ""
    found = await until_gone(request, _suggest(request, house, served, body, body.input, prefix, ""))
    preset = _preset(house, served, body.preset)
    outputs = [
        {"output": preset.shown(s.text, prefix), "score": min(1.0, max(math.exp(s.score), _FEWEST_SCORE))}
        for s in found
    ]
    return JSON({"outputs": outputs})


@router.post("/encode", summary="LeanCopilot: an embedding")
async def encode(request: Request, body: EncodeRequest) -> Response:
    """The embedding of a text, of length 1."""
    served = await until_gone(request, house_of(request).pool.get(body.name))
    if not body.input:
        raise InvalidParameterError("input", "", "a text that is not empty")
    found = await until_gone(request, served.client.embed([body.input]))
    return JSON({"outputs": found.rows[0].tolist()})


async def _suggest(
    request: Request,
    house: House,
    served: Served,
    body: LlmstepRequest | GenerateRequest,
    goal: str,
    prefix: str,
    context: str,
) -> list[Suggestion]:
    preset = _preset(house, served, body.preset)
    template = served.template() if preset.needs_chat else None
    prompt = preset.prompt(goal, prefix, _fitting(context, served), chat=template)
    sampling = SamplingConfig(
        temperature=body.temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        grammar=preset.grammar_for(prefix),
        seed=None if body.seed is None else body.seed % 2**32,
    )
    asking = suggesting(
        prompt,
        body.n,
        body.max_tokens,
        sampling=sampling,
        keep=lambda text: preset.keep(text, prefix),
        stop=preset.stop,
        client=request.client.host if request.client else "",
        request_id=request.scope.get("llamaherd.id", ""),
    )
    found = await drive(house, served, asking)
    return _distinct(found, preset, prefix)


def _distinct(found: list[Suggestion], preset: LeanPreset, prefix: str) -> list[Suggestion]:
    """Those that differ as they are shown, the better one of two alike."""
    shown: dict[str, Suggestion] = {}
    for suggestion in found:
        shown.setdefault(preset.shown(suggestion.text, prefix), suggestion)
    return list(shown.values())


def _fitting(context: str, served: Served) -> str:
    """The end of a file that surely leaves most of the model's context free: its last lines."""
    most = served.info.n_ctx  # characters; a token is about three
    return context if len(context) <= most else context[-most:].partition("\n")[2]


def _preset(house: House, served: Served, asked: str | None) -> LeanPreset:
    """The preset asked for, the server's, or the one that the model's name suggests."""
    name = asked or house.settings.lean_preset
    if not name:
        known = f"{served.name} {served.info.description}".lower()
        name = next((p for p in ("llmstep", "reprover") if p in known), "tactics")
    return lean_preset(name)
