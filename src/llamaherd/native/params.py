"""llama.cpp's parameter structs, filled by llama.cpp's own names."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidParameterError, UnknownParameterError
from .library import GGML, L

__all__ = ["context_param_names", "context_params", "ggml_type", "model_param_names", "model_params"]

# fields that are pointers or callbacks, which llamaherd fills itself
_OWN_MODEL = {"devices", "tensor_buft_overrides", "progress_callback", "progress_callback_user_data"}
_OWN_CONTEXT = {
    "cb_eval",
    "cb_eval_user_data",
    "abort_callback",
    "abort_callback_data",
    "samplers",
    "n_samplers",
    "ctx_other",
}
# parameters that take one of llama.cpp's enums: also accepted by the enum's short name
_ENUMS = {
    "split_mode": "LLAMA_SPLIT_MODE_",
    "load_mode": "LLAMA_LOAD_MODE_",
    "rope_scaling_type": "LLAMA_ROPE_SCALING_TYPE_",
    "pooling_type": "LLAMA_POOLING_TYPE_",
    "attention_type": "LLAMA_ATTENTION_TYPE_",
    "flash_attn_type": "LLAMA_FLASH_ATTN_TYPE_",
}


_LARGEST = 3.4e38  # float
_LONG = 2**63
# llama.cpp's own list (kv_cache_types in common/arg.cpp); it crashes with others
_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


def _names(struct: Any, own: set[str]) -> tuple[str, ...]:
    return tuple(name for name, *_ in struct._fields_ if name not in own)


def model_param_names() -> tuple[str, ...]:
    """Names of llama_model_params that a user may set."""
    return _names(L.llama_model_params, _OWN_MODEL)


def context_param_names() -> tuple[str, ...]:
    """Names of llama_context_params that a user may set."""
    return _names(L.llama_context_params, _OWN_CONTEXT)


def ggml_type(value: int | str, name: str = "type") -> int:
    """A ggml type's number from its name (``"q8_0"``) or number. Raises InvalidParameterError."""
    types = {(GGML.ggml_type_name(i) or b"").decode().lower(): i for i in range(_n_types())}
    types.pop("", None)
    if isinstance(value, str):
        if value.lower() in types:
            return types[value.lower()]
    elif value in types.values():
        return int(value)
    raise InvalidParameterError(name, value, f"one of {', '.join(sorted(types))}")


def cache_type(value: int | str, name: str) -> int:
    """The number of a ggml type that a KV cache can have. Raises InvalidParameterError."""
    allowed = {ggml_type(known): known for known in _CACHE_TYPES}
    number = ggml_type(value, name)
    if number not in allowed:
        raise InvalidParameterError(name, value, f"one of {', '.join(_CACHE_TYPES)}")
    return number


def _n_types() -> int:
    return int(getattr(L, "GGML_TYPE_COUNT", 40))


def _enum(name: str, value: Any) -> int:
    prefix = _ENUMS[name]
    known = {
        k[len(prefix) :].lower(): v for k, v in vars(L).items() if k.startswith(prefix) and isinstance(v, int)
    }
    if isinstance(value, str):
        if value.lower() in known:
            return int(known[value.lower()])
    elif value in known.values():
        return int(value)
    raise InvalidParameterError(name, value, "one of " + ", ".join(f"{k} ({v})" for k, v in known.items()))


def _set(struct: Any, name: str, value: Any) -> None:
    """Set a plain field, refusing what ctypes would silently truncate."""
    kind = {f[0]: f[1] for f in struct._fields_}[name]
    if kind is ctypes.c_bool:
        if not isinstance(value, bool):
            raise InvalidParameterError(name, value, "true or false")
    elif kind is ctypes.c_float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:
            raise InvalidParameterError(name, value, "a finite number of single precision")
    else:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidParameterError(name, value, "an integer")
        if kind(value).value != value:
            bits = ctypes.sizeof(kind) * 8
            raise InvalidParameterError(name, value, f"an integer that fits {bits} bits ({kind.__name__})")
    setattr(struct, name, value)


def _fill(struct: Any, values: Mapping[str, Any], known: Sequence[str]) -> list[Any]:
    """Set the fields; returns what must live as long as the struct is used."""
    keep: list[Any] = []
    for name, value in values.items():
        if name not in known:
            raise UnknownParameterError(name, known, of=type(struct).__name__)
        if name == "tensor_split":
            array = _tensor_split(value)
            keep.append(array)
            struct.tensor_split = ctypes.cast(array, ctypes.POINTER(ctypes.c_float))
        elif name == "kv_overrides":
            overrides = _kv_overrides(value)
            keep.append(overrides)
            struct.kv_overrides = ctypes.cast(overrides, ctypes.POINTER(L.llama_model_kv_override))
        elif name in ("type_k", "type_v"):
            setattr(struct, name, cache_type(value, name))
        elif name in _ENUMS:
            setattr(struct, name, _enum(name, value))
        else:
            _set(struct, name, value)
    return keep


def _tensor_split(value: Any) -> Any:
    limit = int(L.llama_max_devices())
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) > limit:
        raise InvalidParameterError("tensor_split", value, f"a list of at most {limit} numbers, one a device")
    if any(isinstance(v, bool) or not isinstance(v, (int, float)) or not 0 <= v <= _LARGEST for v in value):
        raise InvalidParameterError("tensor_split", value, "finite numbers >= 0")
    return (ctypes.c_float * limit)(*value)


def _kv_overrides(value: Any) -> Any:
    """A mapping of metadata key to int, float, bool or str as llama.cpp's null-terminated array."""
    if not isinstance(value, Mapping):
        raise InvalidParameterError("kv_overrides", value, "a mapping of metadata keys to values")
    array = (L.llama_model_kv_override * (len(value) + 1))()
    for entry, (key, item) in zip(array, value.items(), strict=False):
        name = _short_text(key)
        if not name:
            raise InvalidParameterError("kv_overrides", key, "texts of 1 to 127 bytes without NUL as keys")
        entry.key = name
        if isinstance(item, bool):
            entry.tag, entry.value.val_bool = L.LLAMA_KV_OVERRIDE_TYPE_BOOL, item
        elif isinstance(item, int) and -_LONG <= item < _LONG:
            entry.tag, entry.value.val_i64 = L.LLAMA_KV_OVERRIDE_TYPE_INT, item
        elif isinstance(item, float):
            entry.tag, entry.value.val_f64 = L.LLAMA_KV_OVERRIDE_TYPE_FLOAT, item
        elif (text := _short_text(item)) is not None:
            entry.tag, entry.value.val_str = L.LLAMA_KV_OVERRIDE_TYPE_STR, text
        else:
            raise InvalidParameterError(f"kv_overrides[{key!r}]", item, "an int, float, bool or short str")
    return array


def _short_text(value: Any) -> bytes | None:
    """UTF-8 of at most 127 bytes, which is what llama.cpp has room for."""
    try:
        data = value.encode() if isinstance(value, str) else b"\0"
    except UnicodeEncodeError:  # a lone surrogate
        return None
    return data if len(data) <= 127 and b"\0" not in data else None


def model_params(values: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """llama_model_params with these fields set, and what must be kept alive beside it.

    Raises:
        UnknownParameterError: llama.cpp has no such parameter; the nearest is named.
        InvalidParameterError: the value does not fit the parameter.
    """
    struct = L.llama_model_default_params()
    return struct, _fill(struct, values, model_param_names())


def context_params(values: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """llama_context_params with these fields set, and what must be kept alive beside it.

    Raises:
        UnknownParameterError: llama.cpp has no such parameter; the nearest is named.
        InvalidParameterError: the value does not fit the parameter.
    """
    struct = L.llama_context_default_params()
    return struct, _fill(struct, values, context_param_names())
