"""Contexts, batches, sequence memory and state, with numpy arrays at the border."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedError
from .handles import Handle, Pointer
from .library import GGML, L, strlen
from .params import context_params

__all__ = ["AbortFlag", "BatchBuffer", "LayerTap", "context_facts", "new_context", "tensor_rows"]

_POINTER = np.dtype(np.uintp)
_EMBEDDING_NAMES = (b"embd", b"inp_embd", b"inp_scaled", b"inp_norm", b"inp_norm-0", b"inpL")


class AbortFlag:
    """A flag that llama.cpp polls during a forward without entering Python (see ``library.strlen``)."""

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)
        self.callback = ctypes.cast(strlen, L.ggml_abort_callback)
        self.data = ctypes.cast(self._text, ctypes.c_void_p)

    def set(self) -> None:
        """Make the forward in flight stop."""
        self._text[0] = b"\x01"

    def clear(self) -> None:
        """Let forwards run."""
        self._text[0] = b"\x00"


class LayerTap:
    """Copies the outputs of chosen layers while llama.cpp computes, through its ``cb_eval`` hook.

    llama.cpp names the output of layer i ``l_out-{i}``; the array of each is float32 [n_tokens, n_embd].
    Layers whose architecture names them otherwise never show up. Layer -1 is what enters the first layer:
    the last of the tensors that llama.cpp names before it.
    """

    def __init__(self) -> None:
        self._wanted: dict[bytes, int] = {}
        self.layers: dict[int, list[NDArray[np.float32]]] = {}
        self._last = -1  # the layer after which the graph is left; -1: none
        self._callback = L.ggml_backend_sched_eval_callback(self._on_tensor)

    @property
    def callback(self) -> Any:
        """The C callback; it must live as long as the context."""
        return self._callback

    def record(self, layers: Sequence[int], *, stop: bool = False) -> None:
        """Collect these layers from now on (none: stop collecting); ``stop``: compute nothing behind them."""
        self._last = max(layers, default=-1) if stop else -1
        self._wanted = {f"l_out-{i}".encode(): i for i in layers if i >= 0}
        if -1 in layers:
            self._wanted |= dict.fromkeys(_EMBEDDING_NAMES, -1)
        self.layers = {}

    def _on_tensor(self, tensor: int, ask: bool, _user_data: Any) -> bool:
        if not self._wanted:
            return not ask
        layer = self._wanted.get(GGML.ggml_get_name(tensor))
        if ask:
            return layer is not None
        if layer is not None:
            rows = np.empty(GGML.ggml_nbytes(tensor) // 4, np.float32)
            GGML.ggml_backend_tensor_get(tensor, rows.ctypes.data, 0, rows.nbytes)
            if layer < 0:
                self.layers[layer] = [rows]
            else:
                self.layers.setdefault(layer, []).append(rows)
                return layer != self._last
        return True


def new_context(
    model: Handle, params: Mapping[str, Any], abort: AbortFlag, tap: LayerTap | None = None
) -> Handle | None:
    """llama_init_from_model; None if llama.cpp refuses (its log says why)."""
    struct, keep = context_params(params)
    struct.abort_callback = abort.callback
    struct.abort_callback_data = abort.data
    if tap is not None:
        struct.cb_eval = tap.callback
    pointer = L.llama_init_from_model(model.pointer, struct)
    return Handle(pointer, L.llama_free, "context", (model.pointer, abort, tap, *keep)) if pointer else None


def context_facts(context: Handle) -> dict[str, int]:
    """Sizes as llama.cpp settled them (it rounds and clamps), by the names of its functions."""
    p = context.pointer
    names = ("n_ctx", "n_ctx_seq", "n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch")
    facts = {name: int(getattr(L, f"llama_{name}")(p)) for name in names}
    facts["pooling_type"] = int(L.llama_pooling_type(p))
    return facts


def max_sequences() -> int:
    """llama_max_parallel_sequences: compiled into llama.cpp."""
    return int(L.llama_max_parallel_sequences())


class BatchBuffer:
    """A llama_batch over numpy arrays, filled by slices and not token by token."""

    def __init__(self, capacity: int, n_embd: int) -> None:
        self.capacity = capacity
        self._token = np.zeros(capacity, np.int32)
        self._pos = np.zeros(capacity, np.int32)
        self._n_seq_id = np.ones(capacity, np.int32)
        self._seq = np.zeros(capacity, np.int32)
        self._seq_ptr = (self._seq.ctypes.data + 4 * np.arange(capacity, dtype=_POINTER)).astype(_POINTER)
        self._logits = np.zeros(capacity, np.int8)
        self._embd: NDArray[np.float32] | None = None
        self._n_embd = n_embd
        self._struct = L.llama_batch()
        self._struct.pos = self._pointer(self._pos, "pos")
        self._struct.n_seq_id = self._pointer(self._n_seq_id, "n_seq_id")
        self._struct.seq_id = self._pointer(self._seq_ptr, "seq_id")
        self._struct.logits = self._pointer(self._logits, "logits")

    @staticmethod
    def _pointer(array: NDArray[Any], field: str) -> Any:
        kinds = {f[0]: f[1] for f in L.llama_batch._fields_}
        return ctypes.cast(array.ctypes.data, kinds[field])

    def fill(
        self,
        tokens: NDArray[np.int32] | None,
        embeddings: NDArray[np.float32] | None,
        positions: NDArray[np.int32],
        sequences: NDArray[np.int32],
        outputs: NDArray[np.bool_],
    ) -> Any:
        """The batch with these contents; at most ``capacity`` tokens."""
        n = len(positions)
        if tokens is not None:
            self._token[:n] = tokens
            self._struct.token = self._pointer(self._token, "token")
            self._struct.embd = None
        elif embeddings is not None:
            if self._embd is None:
                self._embd = np.zeros((self.capacity, self._n_embd), np.float32)
            self._embd[:n] = embeddings
            self._struct.token = None
            self._struct.embd = self._pointer(self._embd, "embd")
        self._pos[:n] = positions
        self._seq[:n] = sequences
        self._logits[:n] = outputs
        self._struct.n_tokens = n
        return self._struct


def decode(context: Handle, batch: Any) -> int:
    """llama_decode: 0 done, 1 no room, 2 aborted, < 0 failed."""
    return int(L.llama_decode(context.pointer, batch))


def encode(context: Handle, batch: Any) -> int:
    """llama_encode: encoder-only models and encoders."""
    return int(L.llama_encode(context.pointer, batch))


def logits(context: Handle, rows: int, n_vocab: int) -> NDArray[np.float32]:
    """The logits of the last decode: a view of llama.cpp's buffer, valid until the next one."""
    owner = context.pointer
    return _view(owner, L.llama_get_logits(owner), rows, n_vocab)


def tensor_rows(context: Handle, rows: int, n_embd: int) -> NDArray[np.float32]:
    """The output embeddings (last hidden states) of the last decode: a view, valid until the next one."""
    owner = context.pointer
    return _view(owner, L.llama_get_embeddings(owner), rows, n_embd)


def _view(owner: Pointer, address: Any, rows: int, width: int) -> NDArray[np.float32]:
    """llama.cpp's rows as an array, which keeps the context from being freed as long as it lives."""
    if not address:
        raise UnsupportedError("llama.cpp gave no such output of this batch")
    place = ctypes.cast(address, ctypes.c_void_p).value or 0
    buffer: Any = (ctypes.c_float * (rows * width)).from_address(place)
    buffer.owner = owner
    view: NDArray[np.float32] = np.frombuffer(buffer, np.float32)
    return view.reshape(rows, width)


def pooled(context: Handle, sequence: int, n: int) -> NDArray[np.float32] | None:
    """A copy of one sequence's pooled embedding of the last decode."""
    owner = context.pointer
    address = L.llama_get_embeddings_seq(owner, sequence)
    return _view(owner, address, 1, n)[0].copy() if address else None


def set_embeddings(context: Handle, on: bool) -> None:
    """llama_set_embeddings: whether decodes put out last hidden states."""
    L.llama_set_embeddings(context.pointer, on)


def set_causal(context: Handle, on: bool) -> None:
    """llama_set_causal_attn."""
    L.llama_set_causal_attn(context.pointer, on)


def set_threads(context: Handle, n_threads: int, n_threads_batch: int) -> None:
    """llama_set_n_threads."""
    L.llama_set_n_threads(context.pointer, n_threads, n_threads_batch)


def set_adapters(context: Handle, adapters: Sequence[tuple[Handle, float]]) -> int:
    """llama_set_adapters_lora: exactly these adapters with these scales; 0 if done."""
    n = len(adapters)
    held = [a.pointer for a, _ in adapters]
    pointers = (ctypes.c_void_p * max(n, 1))(*[p.address for p in held])
    scales = (ctypes.c_float * max(n, 1))(*[s for _, s in adapters])
    kinds = L.llama_set_adapters_lora.argtypes
    return int(
        L.llama_set_adapters_lora(
            context.pointer, ctypes.cast(pointers, kinds[1]), n, ctypes.cast(scales, kinds[3])
        )
    )


# ---------------------------------------------------------------------------------------- memory


def has_memory(context: Handle) -> bool:
    """Whether there is a cache at all; contexts of encoders have none."""
    return bool(L.llama_get_memory(context.pointer))


def memory_settle(context: Handle, sequence: int, position: int) -> None:
    """Have llama.cpp carry out copies and shifts that it has put off until its next decode.

    There is no function for that; a token is decoded at a sequence's end and taken back. It need not fit:
    llama.cpp settles before it looks for room.
    """
    zero, true = np.zeros(1, np.int32), np.ones(1, np.bool_)
    buffer = BatchBuffer(1, 1)
    batch = buffer.fill(zero, None, zero + np.int32(position), zero + np.int32(sequence), true)
    L.llama_decode(context.pointer, batch)
    memory_remove(context, sequence, position, -1)


def memory_remove(context: Handle, sequence: int, start: int, end: int) -> bool:
    """llama_memory_seq_rm: drop positions [start, end) (-1: open); False if the cache cannot."""
    owner = context.pointer
    return bool(L.llama_memory_seq_rm(L.llama_get_memory(owner), sequence, start, end))


def memory_copy(context: Handle, source: int, target: int, start: int, end: int) -> None:
    """llama_memory_seq_cp: share (unified) or copy (split) positions [start, end)."""
    owner = context.pointer
    L.llama_memory_seq_cp(L.llama_get_memory(owner), source, target, start, end)


def memory_add(context: Handle, sequence: int, start: int, end: int, delta: int) -> None:
    """llama_memory_seq_add: move positions [start, end) by ``delta`` (K-shift)."""
    owner = context.pointer
    L.llama_memory_seq_add(L.llama_get_memory(owner), sequence, start, end, delta)


def memory_can_shift(context: Handle) -> bool:
    """llama_memory_can_shift."""
    owner = context.pointer
    return bool(L.llama_memory_can_shift(L.llama_get_memory(owner)))


def memory_positions(context: Handle, sequence: int) -> tuple[int, int]:
    """First and last position that a sequence holds; (-1, -1) if empty."""
    owner = context.pointer
    memory = L.llama_get_memory(owner)
    return (
        int(L.llama_memory_seq_pos_min(memory, sequence)),
        int(L.llama_memory_seq_pos_max(memory, sequence)),
    )


def memory_clear(context: Handle) -> None:
    """llama_memory_clear: drop all sequences."""
    owner = context.pointer
    L.llama_memory_clear(L.llama_get_memory(owner), True)


# ----------------------------------------------------------------------------------------- state


def state_get(context: Handle, sequence: int) -> bytes:
    """llama_state_seq_get_data."""
    size = int(L.llama_state_seq_get_size(context.pointer, sequence))
    buffer = (ctypes.c_uint8 * size)()
    n = int(L.llama_state_seq_get_data(context.pointer, buffer, size, sequence))
    return bytes(memoryview(buffer)[:n])


def state_set(context: Handle, sequence: int, data: bytes) -> int:
    """llama_state_seq_set_data: bytes read; 0 if llama.cpp refuses them."""
    buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
    return int(L.llama_state_seq_set_data(context.pointer, buffer, len(data), sequence))
