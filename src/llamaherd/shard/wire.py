"""What stages and the head of a pipeline say to each other: msgpack headers, raw arrays, keys.

    head ── Header + tokens ──▶ stage 0 ── Header + hidden states ──▶ ... ── Header + logits ──▶ head
    head ── Configure | Ping | Abort | Stop ──▶ each stage ── Ready | Pong ──▶ head

Every socket is encrypted and authenticated with CURVE (Bernstein; RFC 26 of ZeroMQ): whoever's public key is
not on the list is not let in, and a recorded message cannot be played again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import IO, Any, TypeAlias

import msgspec
import numpy as np
import zmq
from zmq.auth.thread import ThreadAuthenticator

from ..engine.protocol import FloatArray, IntArray
from ..errors import InvalidParameterError, RequestError
from ..wire_errors import WireError
from .draws import unpack_draws
from .stage import StageFacts
from .work import Operation, StageWork

__all__ = [
    "ACTIVATIONS",
    "Abort",
    "Command",
    "Configure",
    "Endpoint",
    "Header",
    "Keys",
    "Ping",
    "Pong",
    "StageConfig",
    "Stop",
    "address_of",
    "admit_only",
    "decode_array",
    "encode_array",
    "operations_of",
    "read_config",
    "write_config",
]

ACTIVATIONS = ("f32", "f16", "q8_0")
"""How hidden states travel. f32 is exact; f16 rounds to 11 bits; q8_0 to 8 bits in blocks of 32."""

_BLOCK = 32
_LENGTH = struct.Struct("<I")


class Keys(msgspec.Struct, frozen=True):
    """A CURVE key pair, in ZeroMQ's printable form."""

    public: bytes
    secret: bytes

    @classmethod
    def make(cls) -> Keys:
        """A new pair."""
        return cls(*zmq.curve_keypair())

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Have a socket, before bind(), let in only whom the context's authenticator admits."""
        socket.curve_server = True
        socket.curve_secretkey = self.secret
        socket.curve_publickey = self.public

    def call(self, socket: zmq.Socket[bytes], server: bytes) -> None:
        """Have a socket, before connect(), talk to whoever has the secret of ``server`` only."""
        socket.curve_serverkey = server
        socket.curve_secretkey = self.secret
        socket.curve_publickey = self.public


class _Admitted:
    """Asked by the authenticator."""

    def __init__(self, keys: Iterable[bytes]) -> None:
        self._keys = frozenset(keys)

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._keys


def address_of(socket: zmq.Socket[bytes]) -> str:
    """Where a bound socket listens."""
    address = socket.last_endpoint
    return address.decode() if isinstance(address, bytes) else str(address)


def admit_only(context: zmq.Context[Any], keys: Iterable[bytes]) -> ThreadAuthenticator:
    """Start the authenticator of a context: its CURVE servers let in these public keys and nobody else."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=_Admitted(keys))
    return authenticator


class Endpoint(msgspec.Struct, frozen=True):
    """Where a stage listens, who it is and what it holds.

    Attributes:
        data, control: ZeroMQ addresses.
        key: its public key.
        facts: of its stage.
        pid: of its process.
    """

    data: str
    control: str
    key: bytes
    facts: StageFacts
    pid: int


class StageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage's process runs.

    Attributes:
        index: its place in the chain.
        path, start, end: layers [start, end) of a model.
        slices: folder of the slice store; the default one if empty.
        model_params, context_params: llama.cpp's own parameters.
        host: address to listen at.
        keys: its own.
        admitted: public keys of the head and of the other stages.
        activations: how its hidden states travel.
    """

    index: int
    path: str
    start: int
    end: int
    slices: str = ""
    model_params: dict[str, Any] = {}
    context_params: dict[str, Any] = {}
    host: str = "127.0.0.1"
    keys: Keys
    admitted: list[bytes]
    activations: str = "f32"


# -------------------------------------------------------------------------------------- control


class Configure(msgspec.Struct, frozen=True, tag=True):
    """Forget all sequences; from now on take steps of ``epoch``, and send what comes of them to ``address``,
    whose public key is ``key``."""

    epoch: int
    address: str
    key: bytes


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Say that you live."""

    number: int


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Do not compute steps up to ``number``."""

    epoch: int
    number: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End."""


Command: TypeAlias = Configure | Ping | Abort | Stop


class Pong(msgspec.Struct, frozen=True):
    """The answer to Ping and Configure.

    Attributes:
        number: of the ping; the epoch.
        seconds: of computing, in all.
        used_cells: of the KV cache.
        refused: steps that were not taken: of another epoch, or out of order.
    """

    number: int
    seconds: float = 0.0
    used_cells: int = 0
    refused: int = 0


# ----------------------------------------------------------------------------------------- data


class Header(msgspec.Struct, frozen=True, array_like=True):
    """A step; an array follows in the next frame.

    Attributes:
        epoch, number: steps of an epoch are numbered from 0, without gaps.
        operations: (kind, sequence, source, length) of each.
        positions, sequences, outputs: of the batch, as raw int32, int32 and bool.
        form: of the array: "tokens", one of ACTIVATIONS, "logits" (f32), or "none".
        width: its columns.
        error: of the stage that failed; the others carry out the operations only.
        seconds: that each stage so far has computed.
        draws: packed, for the last stage; empty if nothing is drawn.
        picks: packed, from it: what was drawn; the array holds the logits of the other rows.
    """

    epoch: int
    number: int
    operations: list[tuple[str, int, int, int]]
    positions: bytes
    sequences: bytes
    outputs: bytes
    form: str
    width: int = 1
    error: WireError | None = None
    seconds: list[float] = []
    draws: bytes = b""
    picks: bytes = b""

    def work(self, payload: bytes, last: bool) -> StageWork:
        """The step for a stage, which may be the last. Raises RequestError: its parts do not fit together."""
        inputs: IntArray | FloatArray | None = None
        try:
            positions = np.frombuffer(self.positions, np.int32)
            sequences = np.frombuffer(self.sequences, np.int32)
            outputs = np.frombuffer(self.outputs, np.bool_)
            if self.form == "tokens":
                inputs = np.frombuffer(payload, np.int32)
        except ValueError as error:
            raise RequestError(f"the arrays of a step are cut off: {error}") from error
        if self.form not in ("tokens", "none"):
            inputs = decode_array(payload, self.form, len(positions), self.width)
        if (
            not len(positions)
            == len(sequences)
            == len(outputs)
            == (len(positions) if inputs is None else len(inputs))
        ):
            raise RequestError("the arrays of a step are not equally long")
        try:
            draws = unpack_draws(self.draws) if last else None
        except (msgspec.MsgspecError, IndexError) as error:
            raise RequestError(f"the draws of a step are none: {error}") from error
        if draws is not None and len(draws) != len(positions):
            raise RequestError("a step has not a draw for every token")
        return StageWork(operations_of(self), inputs, positions, sequences, outputs, draws)


def operations_of(header: Header) -> tuple[Operation, ...]:
    """A header's operations."""
    return tuple(Operation(*fields) for fields in header.operations)


def encode_array(values: FloatArray, form: str) -> bytes:
    """float32 [n, width] as bytes."""
    if form in ("f32", "logits"):
        return np.ascontiguousarray(values, np.float32).tobytes()
    if form == "f16":
        limit = np.finfo(np.float16).max  # beyond it a value would travel as infinity
        return np.ascontiguousarray(np.clip(values, -limit, limit), np.float16).tobytes()
    if form != "q8_0":
        raise InvalidParameterError("activations", form, f"one of {', '.join(ACTIVATIONS)}")
    blocks = _padded(values).reshape(-1, _BLOCK)
    scales = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float32)
    steps = np.where(scales > 0, blocks / np.where(scales > 0, scales, 1), 0)
    return bytes(scales.tobytes() + np.rint(steps).astype(np.int8).tobytes())


def decode_array(data: bytes, form: str, n: int, width: int) -> FloatArray:
    """float32 [n, width] from bytes. Raises RequestError: they are not as many as that."""
    try:
        if form in ("f32", "logits"):
            return np.frombuffer(data, np.float32).reshape(n, width)
        if form == "f16":
            return np.frombuffer(data, np.float16).reshape(n, width).astype(np.float32)
        n_blocks = n * -(-width // _BLOCK)
        scales = np.frombuffer(data, np.float32, n_blocks).reshape(n_blocks, 1)
        steps = np.frombuffer(data, np.int8, offset=4 * n_blocks).reshape(n_blocks, _BLOCK)
        return np.ascontiguousarray((scales * steps).reshape(n, -1)[:, :width], np.float32)
    except ValueError as error:
        raise RequestError(f"{len(data)} bytes are no {form} array of {n} x {width}") from error


def _padded(values: FloatArray) -> FloatArray:
    short = -values.shape[1] % _BLOCK
    return np.pad(values, ((0, 0), (0, short))) if short else values


# --------------------------------------------------------------------------------------- settings


def write_config(file: IO[bytes], config: StageConfig) -> None:
    """Send a stage's process its settings."""
    data = msgspec.msgpack.encode(config)
    file.write(_LENGTH.pack(len(data)) + data)
    file.flush()


def read_config(file: IO[bytes]) -> StageConfig:
    """A stage's settings."""
    (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
    return msgspec.msgpack.decode(file.read(length), type=StageConfig)
