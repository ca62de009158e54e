"""Models whose tensors come from us and not from a GGUF file (llama_model_init_from_user)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .handles import Handle
from .kernels import enable_kernels
from .library import GGML, L
from .params import model_params

__all__ = ["TensorSlot", "init_from_user"]

Bytes = NDArray[np.uint8]
_TENSOR_SIZE = 336  # of ggml_tensor: where its data pointer may be looked for


class _InitParams(ctypes.Structure):
    """gguf_init_params."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


GGML.gguf_init_from_buffer.restype = ctypes.c_void_p
GGML.gguf_init_from_buffer.argtypes = [ctypes.c_void_p, ctypes.c_size_t, _InitParams]
GGML.gguf_free.argtypes = [ctypes.c_void_p]


class TensorSlot:
    """A tensor that libllama wants filled: copy into it, or point it at bytes that stay."""

    def __init__(self, tensor: int) -> None:
        self._tensor = tensor
        self.name: str = GGML.ggml_get_name(tensor).decode("utf-8", "replace")
        self.nbytes: int = GGML.ggml_nbytes(tensor)

    def copy(self, data: NDArray[Any]) -> None:
        """Copy ``nbytes`` bytes in."""
        data = np.ascontiguousarray(data)
        assert data.nbytes == self.nbytes, (self.name, data.nbytes, self.nbytes)
        GGML.ggml_backend_tensor_set(self._tensor, data.ctypes.data, 0, self.nbytes)

    def point_at(self, data: Bytes) -> bool:
        """Use ``data`` in place, which must live as long as the model; False if that cannot be done.

        The place of the pointer in ggml_tensor is found by looking, and proved by reading it back
        through ggml itself: a later ggml may have moved it.
        """
        if data.nbytes != self.nbytes or data.ctypes.data % 32:
            return False
        offset = _data_offset(self._tensor)
        if offset is None:
            return False
        field = ctypes.c_void_p.from_address(self._tensor + offset)
        old = field.value
        field.value = data.ctypes.data
        if GGML.ggml_get_data(self._tensor) == data.ctypes.data:
            return True
        field.value = old
        return False


def _data_offset(tensor: int) -> int | None:
    """Where in ggml_tensor its data pointer lies; None if that is not clear."""
    data = GGML.ggml_get_data(tensor)
    if not data:
        return None
    places = [
        offset
        for offset in range(0, _TENSOR_SIZE, ctypes.sizeof(ctypes.c_void_p))
        if ctypes.c_void_p.from_address(tensor + offset).value == data
    ]
    return places[0] if len(places) == 1 else None


def init_from_user(
    header: bytes, fill: Callable[[TensorSlot], None], params: Mapping[str, Any], keep: tuple[Any, ...]
) -> Handle | None:
    """A model from a GGUF header and a function that fills each tensor; None if llama.cpp refuses.

    ``keep`` lives as long as the model. An exception of ``fill`` is raised once llama.cpp has returned.
    """
    enable_kernels()
    struct, kept = model_params(params)
    gguf = GGML.gguf_init_from_buffer(header, len(header), _InitParams(True, None))
    if not gguf:
        return None
    failures: list[BaseException] = []

    def on_tensor(tensor: int, _user_data: Any) -> None:
        if failures:
            return
        try:
            fill(TensorSlot(tensor))
        except BaseException as error:  # it must not travel through C
            failures.append(error)

    callback = L.llama_model_set_tensor_data_t(on_tensor)
    try:
        pointer = L.llama_model_init_from_user(gguf, callback, None, struct)
    finally:
        GGML.gguf_free(gguf)
    handle = Handle(pointer, L.llama_model_free, "model", (callback, *kept, *keep)) if pointer else None
    if failures:
        if handle is not None:
            handle.close()
        raise failures[0]
    return handle
