"""Context parameters: our defaults, and what must not reach llama.cpp."""

from __future__ import annotations

from typing import Any

from ..errors import ContextError, InvalidParameterError, UnsupportedError
from ..native import context as native
from .cpus import available_cpus, available_memory
from .model import Model

__all__ = ["check_settings", "default_settings"]

_DEFAULT_CONTEXT = 4096


def default_settings(model: Model) -> dict[str, Any]:
    """What a context is made with unless told otherwise, where llama.cpp's own defaults would not do."""
    cpus = available_cpus()
    trained = model.n_ctx_train or _DEFAULT_CONTEXT
    return {
        "n_ctx": min(trained, _DEFAULT_CONTEXT),
        "n_threads": cpus,
        "n_threads_batch": cpus,
        "kv_unified": True,
        "no_perf": True,
    }


def check_settings(model: Model, settings: dict[str, Any]) -> None:
    """Refuse what llama.cpp would abort on, or would swallow the machine's memory for."""
    if not model.n_layer:
        raise UnsupportedError("this model was loaded with vocab_only and cannot compute; load it without")
    limit = native.max_sequences()
    n_seq = settings.get("n_seq_max", 1)
    if isinstance(n_seq, bool) or not isinstance(n_seq, int) or not 1 <= n_seq <= limit:
        raise InvalidParameterError("n_seq_max", n_seq, f"an integer in [1, {limit}]")
    for name in ("n_ctx", "n_batch", "n_ubatch"):
        value = settings.get(name, 512)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            if name == "n_ctx" and value == 0:
                settings["n_ctx"] = model.n_ctx_train
                continue
            raise InvalidParameterError(name, value, "an integer in [1, 2**31)")
    outputs_max = settings.get("n_outputs_max", 0)
    if isinstance(outputs_max, bool) or not isinstance(outputs_max, int) or not 0 <= outputs_max < 2**31:
        raise InvalidParameterError("n_outputs_max", outputs_max, "an integer in [0, 2**31)")
    for name in ("n_threads", "n_threads_batch"):
        value = settings[name]
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 512:
            raise InvalidParameterError(name, value, "an integer in [1, 512]")
    if model.n_swa and not settings.get("swa_full", True) and settings["kv_unified"] and n_seq > 1:
        raise InvalidParameterError(
            "swa_full",
            False,
            "true, or kv_unified=False: llama.cpp never frees window cells that forks share",
        )
    if model.has_encoder and model.has_decoder and not settings["kv_unified"]:
        raise InvalidParameterError(
            "kv_unified", False, "true with encoder-decoder models, whose graph llama.cpp cannot divide"
        )
    outputs = outputs_max or settings.get("n_batch", 2048)
    if min(outputs, max(settings["n_ctx"], 256)) < n_seq:
        raise InvalidParameterError(
            "n_seq_max", n_seq, f"at most n_batch and n_outputs_max ({outputs}), which llama.cpp requires"
        )
    _check_memory(model, settings)


def _check_memory(model: Model, settings: dict[str, Any]) -> None:
    """llama.cpp clears the KV cache when it makes it: too large a one ends in the kernel's OOM killer."""
    if model.is_recurrent or not model.n_head or not settings.get("offload_kqv", True):
        return
    widths = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
    per_value = min(widths.get(str(settings.get(t, "f16")).lower(), 0.5) for t in ("type_k", "type_v"))
    width = model.n_embd // model.n_head * model.n_head_kv
    needed = int(2 * settings["n_ctx"] * model.n_layer * width * per_value)
    available = available_memory()
    if available is not None and needed > available:
        raise ContextError(
            f"n_ctx = {settings['n_ctx']} needs a KV cache of about {needed / 2**30:.1f} GiB, "
            f"{available / 2**30:.1f} GiB are available; lower n_ctx, or take a smaller type_k and type_v"
        )
