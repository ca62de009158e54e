"""What goes over the socket between the server's process and a worker: msgpack, typed, versioned.

    server ── Submit, Cancel, Call, Stop ──▶ worker
    server ◀── Ready | StartFailed, Heartbeat, Events, Reply ── worker

The worker's settings (WorkerConfig) go in first, through its standard input.
"""

from __future__ import annotations

import struct
from typing import IO, Any, TypeAlias, cast

import msgspec

from ..config import LoraConfig, SamplingConfig, SchedulerConfig
from ..errors import WorkerStartError
from ..types import Finished, GenerationRequest, Prompt, PromptPart, Token, Usage
from ..wire_errors import WireError, pack_error, unpack_error, valid_text

__all__ = [
    "VERSION",
    "Call",
    "Cancel",
    "Down",
    "EmbedCall",
    "Events",
    "Heartbeat",
    "ModelInfo",
    "Ready",
    "Reply",
    "StageStats",
    "StartFailed",
    "Stats",
    "Stop",
    "Submit",
    "TokenizeCall",
    "Up",
    "WireError",
    "WirePrompt",
    "WireRequest",
    "WorkerConfig",
    "decode_down",
    "decode_up",
    "encode",
    "pack_error",
    "pack_prompt",
    "pack_request",
    "read_config",
    "unpack_error",
    "unpack_prompt",
    "unpack_request",
    "write_config",
]

VERSION = 1
_LENGTH = struct.Struct("<I")


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker runs.

    Attributes:
        model: path of the model file.
        params: llama.cpp's own model and context parameters by their names.
        loras: adapters to apply.
        scheduler: how the engine is shared.
        engine: ``"module:function"`` of an Engine of your own in place of a model file; it is called
            without arguments.
        stages: processes of this machine that the model is cut into by layers; 0 runs it in the worker.
        cluster: HOST[:PORT] of a cluster over whose machines it is cut instead.
        replicas: engines on the machines of that cluster, each with the whole model if a machine has room
            for it; 0 for one that is cut.
        few_machines: cut it over as few machines as there must be, not as many as make it faster.
        heartbeat: seconds between signs of life.
        memory_limit: bytes of memory of its own (mapped files not counted) above which the worker is
            replaced; 0 sets no limit.
        cache_dir, cache_bytes: where idle KV states are kept on disk, and how much at most; none if empty.
    """

    model: str = ""
    params: dict[str, Any] = {}
    loras: tuple[LoraConfig, ...] = ()
    scheduler: SchedulerConfig = SchedulerConfig()
    engine: str = ""
    stages: int = 0
    cluster: str = ""
    replicas: int = 0
    few_machines: bool = False
    heartbeat: float = 0.5
    memory_limit: int = 0
    cache_dir: str = ""
    cache_bytes: int = 1 << 30


class _Start(msgspec.Struct, frozen=True):
    """The first thing a worker reads: its settings and where its sockets are."""

    version: int
    up: str
    down: str
    config: WorkerConfig


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the server needs to know of a loaded model. Sizes are in tokens, ``size`` in bytes."""

    architecture: str = ""
    description: str = ""
    n_params: int = 0
    size: int = 0
    n_vocab: int = 0
    n_ctx: int = 0
    n_ctx_train: int = 0
    n_embd: int = 0
    max_sequences: int = 0
    chat_template: str | None = None
    tool_template: str | None = None
    bos: str = ""
    eos: str = ""
    pad: str = ""
    add_bos: bool = False
    control_texts: tuple[str, ...] = ()


class StageStats(msgspec.Struct, frozen=True, array_like=True):
    """A stage of a model that is cut by layers.

    Attributes:
        start, end: it computes layers [start, end).
        weights: bytes.
        used_cells: of its KV cache.
        latency: seconds from a ping to its answer.
        busy: share of the time that it computed, since the last look.
        host: address of its machine.
        pid: of its process.
    """

    start: int
    end: int
    weights: int
    used_cells: int
    latency: float
    busy: float
    host: str
    pid: int


class Stats(msgspec.Struct, frozen=True, array_like=True):
    """A look at a worker; totals count from its start.

    Attributes:
        memory: bytes of its own, mapped files not counted.
        step_seconds: how long the step in flight has taken by now; 0 between steps.
        recoveries: stages that were replaced.
        stages: of a model that is cut by layers.
    """

    waiting: int = 0
    running: int = 0
    cached_sequences: int = 0
    used_cells: int = 0
    n_cells: int = 0
    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    restored_tokens: int = 0
    steps: int = 0
    memory: int = 0
    step_seconds: float = 0.0
    recoveries: int = 0
    stages: list[StageStats] = []


# -------------------------------------------------------------------------------- to the worker


class WirePrompt(msgspec.Struct, frozen=True, array_like=True):
    """A Prompt: exactly one of the three."""

    text: str | None = None
    tokens: list[int] | None = None
    parts: list[PromptPart] | None = None


class WireRequest(msgspec.Struct, frozen=True):
    """A GenerationRequest."""

    prompt: WirePrompt
    max_tokens: int
    n: int
    sampling: SamplingConfig
    beams: int | None
    length_penalty: float
    stop: list[str]
    stop_tokens: list[int]
    ignore_eos: bool
    logprobs: int
    deadline: float | None
    client: str
    indices: list[int] | None
    resume: dict[int, list[int]]
    request_id: str


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Run a request under this number."""

    id: int
    request: WireRequest


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Cancel the request of this number."""

    id: int


class TokenizeCall(msgspec.Struct, frozen=True, array_like=True, tag="tokenize"):
    """The token ids of a prompt, or (tokens given) the text of ids."""

    prompt: WirePrompt
    detokenize: bool = False


class EmbedCall(msgspec.Struct, frozen=True, array_like=True, tag="embed"):
    """Embeddings of prompts, each scaled to length 1 if ``normalize``."""

    prompts: list[WirePrompt]
    normalize: bool = True


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """A question that has one Reply of the same number."""

    id: int
    call: TokenizeCall | EmbedCall


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Keep on disk what is to be kept, and exit."""


Down: TypeAlias = Submit | Cancel | Call | Stop


# ------------------------------------------------------------------------------ from the worker


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The worker takes requests."""

    version: int
    info: ModelInfo


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The worker could not start, and exits."""

    error: WireError


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """A sign of life."""

    stats: Stats


class Events(msgspec.Struct, frozen=True, array_like=True, tag="events"):
    """Events of many requests, by their numbers; a request's tokens come before its end."""

    tokens: list[tuple[int, Token]] = []
    finished: list[tuple[int, Finished]] = []
    failed: list[tuple[int, WireError, Usage]] = []

    def __bool__(self) -> bool:
        return bool(self.tokens or self.finished or self.failed)


class Reply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """The answer to a Call: ids, a text, float32 rows as bytes with their width, or an error."""

    id: int
    tokens: list[int] | None = None
    text: str | None = None
    rows: bytes | None = None
    width: int = 0
    n_tokens: int = 0
    error: WireError | None = None


Up: TypeAlias = Ready | StartFailed | Heartbeat | Events | Reply

_encoder = msgspec.msgpack.Encoder()
_up_decoder: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)
_down_decoder: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)


def encode(message: Up | Down) -> bytes:
    """A message's bytes."""
    return _encoder.encode(message)


def decode_up(data: bytes) -> Up:
    """A message from a worker. Raises msgspec.MsgspecError."""
    return _up_decoder.decode(data)


def decode_down(data: bytes) -> Down:
    """A message to a worker. Raises msgspec.MsgspecError."""
    return _down_decoder.decode(data)


# -------------------------------------------------------------------------------------- requests


def pack_prompt(prompt: Prompt) -> WirePrompt:
    """A prompt for the wire."""
    if isinstance(prompt, str):
        return WirePrompt(text=valid_text(prompt))
    if prompt and all(isinstance(p, PromptPart) for p in prompt):
        parts = [cast(PromptPart, p) for p in prompt]
        return WirePrompt(parts=[PromptPart(valid_text(p.text), p.parse_special) for p in parts])
    return WirePrompt(tokens=[int(cast(int, t)) for t in prompt])


def unpack_prompt(prompt: WirePrompt) -> Prompt:
    """A prompt from the wire."""
    if prompt.text is not None:
        return prompt.text
    return prompt.parts if prompt.parts is not None else prompt.tokens or []


def pack_request(request: GenerationRequest) -> WireRequest:
    """A request for the wire."""
    return WireRequest(
        prompt=pack_prompt(request.prompt),
        max_tokens=min(request.max_tokens, 2**31),
        n=request.n,
        sampling=request.sampling,
        beams=request.beams,
        length_penalty=request.length_penalty,
        stop=[valid_text(s) for s in request.stop],
        stop_tokens=list(request.stop_tokens),
        ignore_eos=request.ignore_eos,
        logprobs=request.logprobs,
        deadline=request.deadline,
        client=valid_text(request.client),
        indices=None if request.indices is None else list(request.indices),
        resume={i: list(tokens) for i, tokens in request.resume.items()},
        request_id=valid_text(request.request_id),
    )


def unpack_request(wire: WireRequest) -> GenerationRequest:
    """A request from the wire. Raises InvalidParameterError, as GenerationRequest does."""
    fields = {name: getattr(wire, name) for name in wire.__struct_fields__}
    return GenerationRequest(**fields | {"prompt": unpack_prompt(wire.prompt)})


# -------------------------------------------------------------------------------------- settings


def write_config(file: IO[bytes], config: WorkerConfig, *, up: str, down: str) -> None:
    """Send a worker its settings and its sockets' addresses."""
    data = _encoder.encode(_Start(VERSION, up, down, config))
    file.write(_LENGTH.pack(len(data)) + data)
    file.flush()


def read_config(file: IO[bytes]) -> tuple[WorkerConfig, str, str]:
    """A worker's settings, and the addresses to send to and to listen at.

    Raises:
        WorkerStartError: the other side speaks another version.
    """
    (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
    start = msgspec.msgpack.decode(file.read(length), type=_Start)
    if start.version != VERSION:
        raise WorkerStartError(f"the server speaks version {start.version}, this worker {VERSION}")
    return start.config, start.up, start.down
