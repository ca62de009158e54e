"""The bodies of OpenAI's endpoints, with the samplers that llama.cpp's users expect beside OpenAI's own.

Unknown fields are let through and logged, as OpenAI ignores them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..config import SamplingConfig
from ..errors import InvalidParameterError

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "EmbeddingRequest",
    "TokenizeRequest",
    "sampling_of",
]

_Text = Annotated[str, Field(max_length=16_000_000)]
_Stop = Annotated[str, Field(max_length=1000)]
_Id = Annotated[int, Field(ge=0, lt=2**31)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = Field(None, max_length=500, description="Name of the model; the default if missing.")


class StreamOptions(BaseModel):
    """What a stream holds beside its chunks."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = None


class _Generation(_Body):
    """Fields that both kinds of completion share."""

    n: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    max_tokens: int | None = Field(None, ge=0)
    seed: int | None = None
    user: str | None = Field(None, max_length=1000)
    logit_bias: dict[str, float] | None = Field(None, max_length=1000)
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    # llama.cpp's
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repeat_penalty: float | None = None
    penalty_last_n: int | None = None
    repeat_last_n: int | None = Field(None, description="llama.cpp's name of penalty_last_n.")
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Annotated[list[_Stop], Field(max_length=64)] | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    grammar: Annotated[str, Field(max_length=200_000)] | None = None
    ignore_eos: bool | None = None
    deadline: float | None = Field(None, gt=0, description="Seconds after which the answer is cut short.")

    @property
    def stops(self) -> list[str]:
        """The stop texts; empty ones are left out."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [s for s in stops if s]

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream."""
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class JsonSchema(BaseModel):
    """A schema that the answer must follow."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    name: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")


class ResponseFormat(BaseModel):
    """Free text, any JSON object, or JSON that follows a schema."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Function(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1, max_length=200)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool: always a function."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: Function


class NamedFunction(BaseModel):
    """The name of a function."""

    model_config = ConfigDict(extra="allow")

    name: str


class NamedTool(BaseModel):
    """The tool that must be called."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: NamedFunction


class Part(BaseModel):
    """A part of a message. Only texts are understood."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(max_length=100)
    content: str | list[Part] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatRequest(_Generation):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(_Generation):
    """``POST /v1/completions``."""

    prompt: (
        _Text
        | list[_Id]
        | Annotated[list[_Text], Field(max_length=256)]
        | Annotated[list[list[_Id]], Field(max_length=256)]
    ) = ""
    best_of: int | None = Field(None, ge=1, le=128)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    suffix: str | None = None


class EmbeddingRequest(_Body):
    """``POST /v1/embeddings``."""

    input: (
        _Text
        | list[_Id]
        | Annotated[list[_Text], Field(max_length=2048)]
        | Annotated[list[list[_Id]], Field(max_length=2048)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None


class TokenizeRequest(_Body):
    """``POST /tokenize``."""

    content: _Text


class DetokenizeRequest(_Body):
    """``POST /detokenize``."""

    tokens: Annotated[list[_Id], Field(max_length=1_000_000)]


_SAMPLERS = tuple(
    name
    for name in SamplingConfig.__dataclass_fields__
    if name in _Generation.model_fields and name != "seed"
)
_BANNED = -100.0  # OpenAI's lowest bias: the token never comes


def sampling_of(body: _Generation) -> SamplingConfig:
    """The sampling that a body asks for; SamplingConfig's defaults for what it does not name.

    Raises:
        InvalidParameterError: a value is out of range.
    """
    given = {name: getattr(body, name) for name in _SAMPLERS}
    values = {name: value for name, value in given.items() if value is not None}
    if body.repeat_last_n is not None:
        values.setdefault("penalty_last_n", body.repeat_last_n)
    if body.seed is not None:
        values["seed"] = body.seed % 2**32
    if "dry_sequence_breakers" in values:
        values["dry_sequence_breakers"] = tuple(values["dry_sequence_breakers"])
    if body.logit_bias:
        values["logit_bias"] = {_token_id(k): _bias(v) for k, v in body.logit_bias.items()}
    return SamplingConfig(**values)


def _token_id(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 9:
        raise InvalidParameterError("logit_bias", key[:40], "its keys are token ids, written as numbers")
    return int(key)


def _bias(value: float) -> float:
    if not -100 <= value <= 100:
        raise InvalidParameterError("logit_bias", value, "its values are in [-100, 100]")
    return float("-inf") if value == _BANNED else value
