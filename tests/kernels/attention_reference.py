"""Attention in float64, and a level's own, called without ggml."""

import ctypes
from dataclasses import dataclass

import numpy as np
from llamaherd_kernels import ggml as graphs
from llamaherd_kernels.library import CACHE_TYPES, load

Four = ctypes.c_int64 * 4


class Operation(ctypes.Structure):
    """kernels/src/attention.h's AttentionOperation."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "mask", "sinks", "out")),
        *((name, Four) for name in ("q_ne", "k_ne", "v_ne", "mask_ne", "q_nb", "k_nb", "v_nb", "mask_nb")),
        ("k_type", ctypes.c_int32),
        ("v_type", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("max_bias", ctypes.c_float),
        ("cap", ctypes.c_float),
    )


@dataclass
class Inputs:
    """float32 q [streams, tokens, heads, columns]; k, v [streams, cells, heads of keys, columns]; float16 mask
    [streams or 1, heads or 1, tokens, cells] or None; float32 sinks [heads] or None."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray | None = None
    sinks: np.ndarray | None = None
    types: tuple[str, str] = ("F16", "F16")
    scale: float = 0.125
    max_bias: float = 0.0
    cap: float = 0.0

    def of(self, tokens):
        """Some tokens alone."""
        mask = None if self.mask is None else self.mask[:, :, tokens]
        return Inputs(
            self.q[:, tokens],
            self.k,
            self.v,
            mask,
            self.sinks,
            self.types,
            self.scale,
            self.max_bias,
            self.cap,
        )


def stored(ggml, values, kind):
    """The bytes of a cache of this type, and what they mean."""
    if kind == "F32":
        return values.astype(np.float32).tobytes(), values.astype(np.float32)
    from gguf import GGMLQuantizationType, dequantize

    rows = np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-1])
    if kind == "F16":
        return rows.astype(np.float16).tobytes(), rows.astype(np.float16).astype(np.float32).reshape(
            values.shape
        )
    data = graphs.quantise(ggml, CACHE_TYPES[kind], rows)
    blocks = np.frombuffer(data, np.uint8).reshape(len(rows), -1)
    return data, dequantize(blocks, GGMLQuantizationType(CACHE_TYPES[kind])).reshape(values.shape)


def attend(ggml, level, x, threads=1):
    """A level's result [streams, tokens, heads, columns], float32."""
    streams, tokens, heads, columns = x.q.shape
    cells, kv_heads = x.k.shape[1:3]
    q = np.ascontiguousarray(x.q, np.float32)
    out = np.full((streams, tokens, heads, x.v.shape[-1]), 7, np.float32)
    operation = Operation(scale=x.scale, max_bias=x.max_bias, cap=x.cap, q=q.ctypes.data, out=out.ctypes.data)
    operation.q_ne = Four(columns, tokens, heads, streams)
    operation.q_nb = Four(4, 4 * columns * heads, 4 * columns, 4 * columns * heads * tokens)
    keep = [q]
    for name, values, kind in (("k", x.k, x.types[0]), ("v", x.v, x.types[1])):
        data, _ = stored(ggml, values, kind)
        keep.append(buffer := ctypes.create_string_buffer(data, len(data)))
        row = len(data) // (streams * cells * kv_heads)
        setattr(operation, name, ctypes.addressof(buffer))
        setattr(operation, f"{name}_ne", Four(values.shape[-1], cells, kv_heads, streams))
        size = {"F32": 4, "Q8_0": 34}.get(kind, 2)
        setattr(operation, f"{name}_nb", Four(size, row * kv_heads, row, row * kv_heads * cells))
        setattr(operation, f"{name}_type", CACHE_TYPES[kind])
    if x.mask is not None:
        keep.append(mask := np.ascontiguousarray(x.mask))
        operation.mask = mask.ctypes.data
        operation.mask_ne, operation.mask_nb = Four(*mask.shape[::-1]), Four(*mask.strides[::-1])
    if x.sinks is not None:
        keep.append(sinks := np.ascontiguousarray(x.sinks, np.float32))
        operation.sinks = sinks.ctypes.data
    if not load().llamaherd_kernels_attend(level.encode(), ctypes.byref(operation), threads):
        return None
    return out


def slopes(heads, max_bias):
    """ALiBi's, as in ggml."""
    if not max_bias:
        return np.ones(heads)
    even, head = 1 << int(np.log2(heads)), np.arange(heads)
    return np.where(
        head < even,
        2.0 ** (-max_bias / even * (head + 1)),
        2.0 ** (-max_bias / 2 / even * (2 * (head - even) + 1)),
    )


def reference(ggml, x):
    """The same in float64, of the cache as it is stored."""
    group = x.q.shape[2] // x.k.shape[2]
    k, v = (
        np.repeat(stored(ggml, values, kind)[1].astype(np.float64), group, 2)
        for values, kind in ((x.k, x.types[0]), (x.v, x.types[1]))
    )
    scores = np.einsum("snhd,schd->shnc", x.q.astype(np.float64), k) * x.scale
    if x.cap:
        scores = x.cap * np.tanh(scores / x.cap)
    if x.mask is not None:
        bias = x.mask.astype(np.float64) * slopes(x.q.shape[2], x.max_bias)[None, :, None, None]
        scores = np.where(np.isneginf(bias), -np.inf, scores + bias)
    top = scores.max(-1, keepdims=True)
    if x.sinks is not None:
        sinks = x.sinks.astype(np.float64)[None, :, None, None]
        top = np.maximum(top, sinks)
    top = np.where(np.isneginf(top), 0, top)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if x.sinks is not None:
        total = total + np.exp(sinks - top)
    return np.einsum("shnc,schd->snhd", weights / np.where(total == 0, 1, total), v)


def inputs(kind="causal", tokens=37, cells=300, heads=(6, 2), columns=(64, 64), streams=1, seed=0, **more):
    """Random inputs under a mask of some kind; the third token sees nothing."""
    random = np.random.default_rng(seed)
    q = random.standard_normal((streams, tokens, heads[0], columns[0])).astype(np.float32) * 2
    k = random.standard_normal((streams, cells, heads[1], columns[0])).astype(np.float32)
    v = random.standard_normal((streams, cells, heads[1], columns[1])).astype(np.float32)
    if kind == "none":
        return Inputs(q, k, v, **more)
    token, cell = np.arange(tokens)[:, None], np.arange(cells)[None]
    at = cells - tokens + token
    seen = {
        "causal": cell <= at,
        "window": (cell <= at) & (cell > at - 90),
        "prompt and own": (cell < cells // 2) | ((cell <= at) & (cell % 7 == token % 7)),
        "apart": cell * tokens // cells == token,
        "random": random.random((tokens, cells)) < 0.3,
        "per head": (cell <= at) & (random.random((heads[0], tokens, cells)) < 0.7),
    }[kind]
    bias = -np.abs(at - cell) / 16 if more.get("max_bias") else 0.0
    mask = np.where(seen, bias, -np.inf).astype(np.float16)
    mask[..., min(2, tokens - 1), :] = -np.inf
    return Inputs(
        q,
        k,
        v,
        np.broadcast_to(mask, (streams, seen.shape[0] if seen.ndim == 3 else 1, tokens, cells)),
        **more,
    )
