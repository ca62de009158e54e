"""libllama's quantiser, bound: it blocks until it is done and cannot be interrupted.

See engine/quantize.py for one that can.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InvalidParameterError, NativeError
from .library import L, forget_log, recent_log

__all__ = ["file_types", "quantize_file"]

_PREFIX = "LLAMA_FTYPE_MOSTLY_"
_SHORT = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m", "mxfp4": "mxfp4_moe"}


def file_types() -> dict[str, int]:
    """llama_ftype's numbers by the names that users write: q8_0, q4_k_m, iq4_xs, ..."""
    names = {key.removeprefix(_PREFIX).lower(): key for key in dir(L) if key.startswith(_PREFIX)}
    found = {name: int(getattr(L, key)) for name, key in names.items()}
    found["f32"] = int(L.LLAMA_FTYPE_ALL_F32)
    found |= {short: found[long] for short, long in _SHORT.items() if long in found}
    return found


def quantize_file(
    source: str,
    target: str,
    type: str,
    *,
    imatrix: Mapping[str, npt.NDArray[np.float32]] | None = None,
    n_threads: int = 0,
) -> None:
    """Quantise a GGUF with ``llama_model_quantize``; ``imatrix`` holds importances by weight.

    Raises InvalidParameterError for an unknown type, NativeError if libllama fails.
    """
    types = file_types()
    if type.lower() not in types:
        raise InvalidParameterError("type", type, f"one of {', '.join(sorted(types))}")
    params = L.llama_model_quantize_default_params()
    params.ftype = types[type.lower()]
    params.nthread = n_threads
    params.allow_requantize = True
    kept = _matrices(imatrix or {})
    if imatrix:
        params.imatrix = kept
    forget_log()
    if L.llama_model_quantize(source.encode(), target.encode(), params):
        raise NativeError(f"quantising {source} to {type} failed", recent_log())


def _matrices(found: Mapping[str, npt.NDArray[np.float32]]) -> Any:
    """llama.cpp's array of (name, data, size), ended by an empty one; the caller keeps ``found`` alive."""
    array = (L.llama_model_imatrix_data * (len(found) + 1))()
    for entry, (name, values) in zip(array, found.items(), strict=False):
        entry.name = name.encode()
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        entry.size = len(values)
    return array
