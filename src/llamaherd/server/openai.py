"""OpenAI's endpoints: chat completions, completions, embeddings, models, tokens."""

from __future__ import annotations

import base64
import json
import logging
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from ..config import SamplingConfig
from ..errors import InvalidParameterError, TokenError
from ..types import GenerationRequest, Prompt
from . import chat_prompt, schema
from .answer import Answer, Choice
from .choices import ChatChoice, TextChoice
from .pool import Served
from .responses import JSON, until_gone
from .state import house_of
from .tools import call_schema

__all__ = ["router"]

log = logging.getLogger("llamaherd.server")
router = APIRouter()

_UNLIMITED = 2**31 - 1
_MOST_CHOICES = 256


# ------------------------------------------------------------------------------------------- chat


@router.post("/v1/chat/completions", summary="Answer a conversation")
async def chat_completions(request: Request, body: schema.ChatRequest) -> Response:
    """OpenAI's chat completions, with llama.cpp's samplers as further fields."""
    house = house_of(request)
    _log_unknown(body)
    served = await until_gone(request, house.pool.get(body.model))
    tools = chat_prompt.offered_tools(body)
    forced = chat_prompt.forced_tools(body, tools)
    sampling = _constrained(schema.sampling_of(body), body, forced)
    prompt = await chat_prompt.render(served, body)
    if house.settings.log_prompts:
        log.info("prompt: %r", "".join(p.text for p in prompt))
    limit = body.max_completion_tokens or body.max_tokens or _UNLIMITED
    n = body.n or 1
    top = (body.top_logprobs or 0) if body.logprobs else 0
    generation = _generation(request, body, prompt, limit, n, sampling, top)
    names = [t["function"]["name"] for t in tools] if tools else None
    choices = [ChatChoice(i, logprobs=bool(body.logprobs), tools=names) for i in range(n)]
    answer = Answer("chat.completion", f"chatcmpl-{_request_id(request)}", served, body, choices)
    return await answer.respond(request, house, [generation])


def _constrained(
    sampling: SamplingConfig, body: schema.ChatRequest, forced: Sequence[dict[str, Any]]
) -> SamplingConfig:
    """Bound to a JSON schema, if the request asks for JSON or for a tool call."""
    wanted: Any = None
    form = body.response_format
    if forced:
        wanted = call_schema(forced)
    elif form is not None and form.type == "json_object":
        wanted = {"type": "object"}
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise InvalidParameterError("response_format", "json_schema", "it holds json_schema.schema")
        wanted = form.json_schema.schema_
        if isinstance(wanted, bool):
            wanted = {} if wanted else {"not": {}}
    if wanted is None:
        return sampling
    try:
        text = json.dumps(wanted)
    except RecursionError as error:
        raise InvalidParameterError(
            "response_format", "...", "a schema that is not nested so deep"
        ) from error
    return sampling.replace(json_schema=text)


# ------------------------------------------------------------------------------------ completions


@router.post("/v1/completions", summary="Continue a text")
async def completions(request: Request, body: schema.CompletionRequest) -> Response:
    """OpenAI's (legacy) completions: texts or token ids are continued as they are."""
    house = house_of(request)
    _log_unknown(body)
    served = await until_gone(request, house.pool.get(body.model))
    sampling = schema.sampling_of(body)
    n = body.n or 1
    best_of = max(body.best_of or n, n)
    prompts = _prompts(body, served.info.n_vocab)
    if body.suffix:
        raise InvalidParameterError("suffix", body.suffix[:40], "not supported; put it into the prompt")
    if best_of > n and body.streams:
        raise InvalidParameterError("best_of", best_of, "equal to n when the answer is a stream")
    if body.echo and body.logprobs is not None:
        raise InvalidParameterError("echo", True, "not beside logprobs: those of the prompt are not computed")
    if len(prompts) * best_of > _MOST_CHOICES:
        raise InvalidParameterError("n", n, f"at most {_MOST_CHOICES} choices of all prompts together")
    if body.max_tokens == 0:
        raise InvalidParameterError("max_tokens", 0, "at least 1")
    limit = body.max_tokens or 16
    generations = []
    choices: list[Choice] = []
    for prompt in prompts:
        generations.append(_generation(request, body, prompt, limit, best_of, sampling, body.logprobs or 0))
        echo = await _echo(served, prompt) if body.echo else ""
        for _ in range(best_of):
            choices.append(TextChoice(len(choices), logprobs=body.logprobs, echo=echo))
    answer = Answer("text_completion", f"cmpl-{_request_id(request)}", served, body, choices, keep=n)
    return await answer.respond(request, house, generations)


def _prompts(body: schema.CompletionRequest, n_vocab: int) -> list[Prompt]:
    prompt: Any = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidParameterError("prompt", [], "at least one prompt")
    prompts = [prompt] if isinstance(prompt[0], int) else list(prompt)
    for tokens in prompts:
        if isinstance(tokens, list):
            _check_tokens(tokens, n_vocab)
    return prompts


def _check_tokens(tokens: Sequence[int], n_vocab: int) -> None:
    for i, token in enumerate(tokens):
        if token >= n_vocab:
            raise TokenError(token, n_vocab, i)


async def _echo(served: Served, prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return await served.client.detokenize(prompt)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------ the answer


def _generation(
    request: Request,
    body: schema._Generation,
    prompt: Prompt,
    max_tokens: int,
    n: int,
    sampling: SamplingConfig,
    top: int,
) -> GenerationRequest:
    client = request.client.host if request.client else ""
    return GenerationRequest(
        prompt,
        max_tokens=min(max_tokens, _UNLIMITED),
        n=n,
        sampling=sampling,
        stop=body.stops,
        ignore_eos=bool(body.ignore_eos),
        logprobs=top,
        deadline=body.deadline,
        client=f"{client}/{body.user or ''}",
        request_id=_request_id(request),
    )


# ------------------------------------------------------------------------------------ embeddings


@router.post("/v1/embeddings", summary="Embed texts")
async def embeddings(request: Request, body: schema.EmbeddingRequest) -> Response:
    """Embeddings, pooled as the model was trained to, or the mean of the last hidden states."""
    house = house_of(request)
    _log_unknown(body)
    served = await until_gone(request, house.pool.get(body.model))
    given: Any = body.input
    if not given:
        raise InvalidParameterError("input", given, "a text or a list of texts that is not empty")
    inputs = [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)
    for item in inputs:
        if not item:
            raise InvalidParameterError("input", item, "texts that are not empty")
        if not isinstance(item, str):
            _check_tokens(item, served.info.n_vocab)
    width = body.dimensions
    if width is not None and width > served.info.n_embd:
        raise InvalidParameterError("dimensions", width, f"at most {served.info.n_embd}")
    found = await until_gone(request, served.client.embed(inputs, normalize=width is None))
    rows = found.rows
    if width is not None:
        rows = rows[:, :width]
        rows = rows / (rows**2).sum(axis=1, keepdims=True).clip(1e-30) ** 0.5
    data = []
    for i, row in enumerate(rows):
        encoded = base64.b64encode(row.astype("<f4").tobytes()).decode()
        value = encoded if body.encoding_format == "base64" else row.tolist()
        data.append({"object": "embedding", "index": i, "embedding": value})
    usage = {"prompt_tokens": found.n_tokens, "total_tokens": found.n_tokens}
    return JSON({"object": "list", "data": data, "model": served.name, "usage": usage})


# ------------------------------------------------------------------------------- models and tokens


@router.get("/v1/models", summary="The models served")
async def models(request: Request) -> Response:
    """All models that may be named; facts of those that are loaded."""
    house = house_of(request)
    loaded = {s.name: s for s in house.pool.loaded}
    return JSON({"object": "list", "data": [_model(name, loaded.get(name)) for name in house.pool.names]})


@router.get("/v1/models/{name:path}", summary="One model")
async def model(request: Request, name: str) -> Response:
    """A model by its name."""
    house = house_of(request)
    found = house.pool.find(name)
    return JSON(_model(found, next((s for s in house.pool.loaded if s.name == found), None)))


def _model(name: str, served: Served | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": served.created if served else 0,
        "owned_by": "llamaherd",
        "loaded": served is not None,
    }
    if served is not None:
        info = served.info
        facts |= {
            "architecture": info.architecture,
            "description": info.description,
            "context_length": info.n_ctx,
            "training_context_length": info.n_ctx_train,
            "parameters": info.n_params,
            "size": info.size,
            "vocabulary_size": info.n_vocab,
            "embedding_length": info.n_embd,
            "chat": info.chat_template is not None,
        }
    return facts


@router.post("/tokenize", summary="Token ids of a text")
async def tokenize(request: Request, body: schema.TokenizeRequest) -> Response:
    """The ids, with the model's BOS where it wants one; control tokens are never parsed."""
    served = await until_gone(request, house_of(request).pool.get(body.model))
    tokens = await until_gone(request, served.client.tokenize(body.content))
    return JSON({"tokens": tokens, "count": len(tokens), "max_model_len": served.info.n_ctx})


@router.post("/detokenize", summary="The text of token ids")
async def detokenize(request: Request, body: schema.DetokenizeRequest) -> Response:
    """Bytes that are no UTF-8 show as U+FFFD."""
    served = await until_gone(request, house_of(request).pool.get(body.model))
    _check_tokens(body.tokens, served.info.n_vocab)
    text = await until_gone(request, served.client.detokenize(body.tokens))
    return JSON({"content": text, "prompt": text})


def _request_id(request: Request) -> str:
    known: str | None = request.scope.get("llamaherd.id")
    return known or uuid.uuid4().hex


def _log_unknown(body: BaseModel) -> None:
    unknown = sorted(body.model_extra or {})
    if unknown:
        log.info("fields that are not known were ignored: %s", ", ".join(unknown)[:500])
