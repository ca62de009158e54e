"""ggml's own products and attention, stock or through the plug-in, for the self-test and benchmarks."""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["Attention", "Product", "bind", "quantise"]

_P, _I, _W, _Z, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t, ctypes.c_float
_F32, _F16, _I32 = 0, 1, 26
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ggml_new_tensor_2d": (_P, [_P, _I, _W, _W]),
    "ggml_new_tensor_3d": (_P, [_P, _I, _W, _W, _W]),
    "ggml_new_tensor_1d": (_P, [_P, _I, _W]),
    "ggml_new_tensor_4d": (_P, [_P, _I, _W, _W, _W, _W]),
    "ggml_view_4d": (_P, [_P, _P, _W, _W, _W, _W, _Z, _Z, _Z, _Z]),
    "ggml_flash_attn_ext": (_P, [_P, _P, _P, _P, _P, _F, _F, _F]),
    "ggml_flash_attn_ext_add_sinks": (None, [_P, _P]),
    "ggml_mul_mat": (_P, [_P, _P, _P]),
    "ggml_mul_mat_id": (_P, [_P, _P, _P, _P]),
    "ggml_new_graph": (_P, [_P]),
    "ggml_build_forward_expand": (None, [_P, _P]),
    "ggml_free": (None, [_P]),
    "ggml_nbytes": (_Z, [_P]),
    "ggml_row_size": (_Z, [_I, _W]),
    "ggml_quantize_chunk": (_Z, [_I, _P, _P, _W, _W, _W, _P]),
    "ggml_backend_cpu_init": (_P, []),
    "ggml_backend_cpu_set_n_threads": (None, [_P, _I]),
    "ggml_backend_cpu_buffer_type": (_P, []),
    "ggml_backend_cpu_reg": (_P, []),
    "ggml_backend_reg_dev_get": (_P, [_P, _Z]),
    "ggml_backend_reg_get_proc_address": (_P, [_P, ctypes.c_char_p]),
    "ggml_backend_buft_name": (ctypes.c_char_p, [_P]),
    "ggml_backend_free": (None, [_P]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, [_P, _P]),
    "ggml_backend_buffer_set_usage": (None, [_P, _I]),
    "ggml_backend_buffer_free": (None, [_P]),
    "ggml_backend_tensor_set": (None, [_P, _P, _Z, _Z]),
    "ggml_backend_tensor_get": (None, [_P, _P, _Z, _Z]),
    "ggml_backend_graph_compute": (_I, [_P, _P]),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, [_P, _P]),
}


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", _Z), ("mem_buffer", _P), ("no_alloc", ctypes.c_bool))


def bind() -> Any:
    """The library that llama_cpp has loaded: all of ggml's functions are found through it."""
    from llama_cpp import llama_cpp

    # a library of ours with the same handle: function types set here are not set on llama_cpp's object
    library = ctypes.CDLL(llama_cpp._lib._name, handle=llama_cpp._lib._handle)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.ggml_init.restype, library.ggml_init.argtypes = _P, [_InitParams]
    return library


def quantise(ggml: Any, kind: int, values: Any) -> bytes:
    """float32 values (ctypes array or buffer of [rows, K], given as a numpy array) in a ggml type."""
    rows, columns = values.shape
    out = ctypes.create_string_buffer(ggml.ggml_row_size(kind, columns) * rows)
    importance = (ctypes.c_float * columns)(*([1.0] * columns))
    ggml.ggml_quantize_chunk(kind, values.ctypes.data, out, 0, rows, columns, importance)
    return out.raw


class Product:
    """MUL_MAT, or MUL_MAT_ID for weights of several experts, on ggml's CPU backend. Close it.

    Args:
        ggml: ``bind()``'s.
        kind: ggml type of the weights.
        shape: (K, N), or (K, N, experts).
        rows: rows of activations; for experts: tokens.
        used: experts a token uses.
        buffer: name of the buffer type that holds the weights ("CPU", "CPU_REPACK", "LLAMAHERD").
        threads: of the CPU backend.
    """

    def __init__(
        self,
        ggml: Any,
        kind: int,
        shape: tuple[int, ...],
        rows: int,
        buffer: str,
        threads: int = 1,
        used: int = 0,
    ) -> None:
        self._ggml = ggml
        k, n = shape[:2]
        self._weights_context = ggml.ggml_init(_InitParams(1 << 16, None, True))
        self._context = ggml.ggml_init(_InitParams(1 << 20, None, True))
        if used:
            self._weights = ggml.ggml_new_tensor_3d(self._weights_context, kind, k, n, shape[2])
            self._x = ggml.ggml_new_tensor_3d(self._context, _F32, k, 1, rows)
            self._ids = ggml.ggml_new_tensor_2d(self._context, _I32, used, rows)
            self._out = ggml.ggml_mul_mat_id(self._context, self._weights, self._x, self._ids)
        else:
            self._weights = ggml.ggml_new_tensor_2d(self._weights_context, kind, k, n)
            self._x = ggml.ggml_new_tensor_2d(self._context, _F32, k, rows)
            self._ids = None
            self._out = ggml.ggml_mul_mat(self._context, self._weights, self._x)
        self._graph = ggml.ggml_new_graph(self._context)
        ggml.ggml_build_forward_expand(self._graph, self._out)
        self.shape = (rows, used, n) if used else (rows, n)
        self._buffers = [
            ggml.ggml_backend_alloc_ctx_tensors_from_buft(self._weights_context, _buffer_type(ggml, buffer)),
            ggml.ggml_backend_alloc_ctx_tensors_from_buft(self._context, ggml.ggml_backend_cpu_buffer_type()),
        ]
        ggml.ggml_backend_buffer_set_usage(self._buffers[0], 1)
        device = ggml.ggml_backend_reg_dev_get(ggml.ggml_backend_cpu_reg(), 0)
        self.supported = bool(ggml.ggml_backend_dev_supports_op(device, self._out))
        self._backend = ggml.ggml_backend_cpu_init()
        ggml.ggml_backend_cpu_set_n_threads(self._backend, threads)

    def set_weights(self, data: bytes) -> None:
        """Bytes in ggml's layout; packed by the buffer type."""
        if len(data) != self._ggml.ggml_nbytes(self._weights):
            raise ValueError(f"{len(data)} bytes, not {self._ggml.ggml_nbytes(self._weights)}")
        self._ggml.ggml_backend_tensor_set(self._weights, data, 0, len(data))

    def set_activations(self, x: Any, ids: Any = None) -> None:
        """float32 numpy array [rows, K]; int32 [rows, used]."""
        self._ggml.ggml_backend_tensor_set(self._x, x.ctypes.data, 0, x.nbytes)
        if ids is not None:
            self._ggml.ggml_backend_tensor_set(self._ids, ids.ctypes.data, 0, ids.nbytes)

    def compute(self) -> None:
        """Run the graph."""
        status = self._ggml.ggml_backend_graph_compute(self._backend, self._graph)
        if status != 0:
            raise RuntimeError(f"ggml_backend_graph_compute returned {status}")

    def result(self) -> Any:
        """float32 numpy array [rows, N] or [rows, used, N]."""
        import numpy as np

        out = np.empty(self.shape, np.float32)
        self._ggml.ggml_backend_tensor_get(self._out, out.ctypes.data, 0, out.nbytes)
        return out

    def close(self) -> None:
        """Free everything."""
        for buffer in self._buffers:
            self._ggml.ggml_backend_buffer_free(buffer)
        self._ggml.ggml_backend_free(self._backend)
        self._ggml.ggml_free(self._context)
        self._ggml.ggml_free(self._weights_context)
        self._buffers = []


class Attention:
    """FLASH_ATTN_EXT on ggml's CPU backend, over views as llama.cpp's cache has them. Close it.

    Args:
        ggml: ``bind()``'s.
        types: ggml types of keys and values.
        shape: streams, tokens, heads, heads of keys, cells.
        columns: of a head's keys, and of its values.
        mask: shape (streams or 1, heads or 1) of the masks, or None for no mask.
        scale, max_bias, cap: as in ggml_flash_attn_ext.
        sinks: whether there are attention sinks.
        threads: of the CPU backend.
    """

    def __init__(
        self,
        ggml: Any,
        types: tuple[int, int],
        shape: tuple[int, int, int, int, int],
        columns: tuple[int, int],
        *,
        mask: tuple[int, int] | None = (1, 1),
        scale: float = 1.0,
        max_bias: float = 0.0,
        cap: float = 0.0,
        sinks: bool = False,
        threads: int = 1,
    ) -> None:
        self._ggml = ggml
        streams, tokens, heads, kv_heads, cells = shape
        self._context = context = ggml.ggml_init(_InitParams(1 << 20, None, True))
        self._types = types

        def tensor(kind: int, width: int, heads: int, rows: int) -> tuple[Any, Any]:
            """The tensor [streams, rows, heads x width], and its view [streams, heads, rows, width]."""
            whole = ggml.ggml_new_tensor_4d(context, kind, width * heads, rows, streams, 1)
            one, row = ggml.ggml_row_size(kind, width), ggml.ggml_row_size(kind, width * heads)
            view = ggml.ggml_view_4d(context, whole, width, rows, heads, streams, row, one, row * rows, 0)
            return whole, view

        self._q, q = tensor(_F32, columns[0], heads, tokens)
        self._k, k = tensor(types[0], columns[0], kv_heads, cells)
        self._v, v = tensor(types[1], columns[1], kv_heads, cells)
        self._mask = mask and ggml.ggml_new_tensor_4d(context, _F16, cells, tokens, mask[1], mask[0])
        self._sinks = ggml.ggml_new_tensor_1d(context, _F32, heads) if sinks else None
        self._out = ggml.ggml_flash_attn_ext(context, q, k, v, self._mask, scale, max_bias, cap)
        if sinks:
            ggml.ggml_flash_attn_ext_add_sinks(self._out, self._sinks)
        self._graph = ggml.ggml_new_graph(context)
        ggml.ggml_build_forward_expand(self._graph, self._out)
        self.shape = (streams, tokens, heads, columns[1])
        self._buffer = ggml.ggml_backend_alloc_ctx_tensors_from_buft(
            context, ggml.ggml_backend_cpu_buffer_type()
        )
        self._backend = ggml.ggml_backend_cpu_init()
        ggml.ggml_backend_cpu_set_n_threads(self._backend, threads)

    def set(self, q: Any, k: Any, v: Any, mask: Any = None, sinks: Any = None) -> None:
        """Fill it.

        Args:
            q: float32 [streams, tokens, heads, columns].
            k: float32 [streams, cells, heads of keys, columns]; v likewise.
            v: see k.
            mask: float16 [streams or 1, heads or 1, tokens, cells].
            sinks: float32 [heads].
        """
        import numpy as np

        put = self._ggml.ggml_backend_tensor_set
        for tensor, values in ((self._q, q), (self._mask, mask), (self._sinks, sinks)):
            if tensor:
                values = np.ascontiguousarray(values)
                put(tensor, values.ctypes.data, 0, values.nbytes)
        for tensor, values, kind in ((self._k, k, self._types[0]), (self._v, v, self._types[1])):
            rows = np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-2] * values.shape[-1])
            data = rows.tobytes() if kind == _F32 else quantise(self._ggml, kind, rows)
            put(tensor, data, 0, len(data))

    def compute(self) -> None:
        """Run the graph."""
        status = self._ggml.ggml_backend_graph_compute(self._backend, self._graph)
        if status != 0:
            raise RuntimeError(f"ggml_backend_graph_compute returned {status}")

    def result(self) -> Any:
        """float32 numpy array [streams, tokens, heads, columns]."""
        import numpy as np

        out = np.empty(self.shape, np.float32)
        self._ggml.ggml_backend_tensor_get(self._out, out.ctypes.data, 0, out.nbytes)
        return out

    def close(self) -> None:
        """Free everything."""
        self._ggml.ggml_backend_buffer_free(self._buffer)
        self._ggml.ggml_backend_free(self._backend)
        self._ggml.ggml_free(self._context)


def _buffer_type(ggml: Any, name: str) -> Any:
    if name == "CPU":
        return ggml.ggml_backend_cpu_buffer_type()
    address = ggml.ggml_backend_reg_get_proc_address(
        ggml.ggml_backend_cpu_reg(), b"ggml_backend_dev_get_extra_bufts"
    )
    extras = ctypes.CFUNCTYPE(ctypes.POINTER(_P), _P)(address)(
        ggml.ggml_backend_reg_dev_get(ggml.ggml_backend_cpu_reg(), 0)
    )
    i = 0
    while extras[i]:
        if ggml.ggml_backend_buft_name(extras[i]).decode() == name:
            return extras[i]
        i += 1
    raise LookupError(f"ggml's CPU has no buffer type {name}")
