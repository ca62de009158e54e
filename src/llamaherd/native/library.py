"""Find llama_cpp's libraries, check what llamaherd relies on, and route llama.cpp's log into logging.

Importing this module loads libllama. Everything that a later llama-cpp-python could change under us is
checked here, once, so that it fails at import with the reason instead of corrupting memory later.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import ctypes.util
import importlib.metadata
import logging
import os
from pathlib import Path
from typing import Any

from ..errors import LibraryError

__all__ = ["GGML", "LOGGER", "L", "forget_log", "library_info", "recent_log", "strlen"]

LOGGER = logging.getLogger("llamaherd.llama_cpp")
LOGGER.addHandler(logging.NullHandler())

_TESTED = "0.3.36"
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}
_CONTINUE = 5


def _import() -> Any:
    # unless told otherwise before it is loaded, OpenMP's threads spin long while they wait for each other,
    # which beside another busy process costs most of the speed; sleeping soon costs five sixths of it where
    # an idle CPU wakes up late. So they spin shortly, then sleep (docs/decisions.md has the figures)
    if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
        os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="1000")
    try:
        from llama_cpp import llama_cpp
    except Exception as error:
        raise LibraryError(
            f"llama-cpp-python cannot be imported ({error}); reinstall it: "
            f"pip install --force-reinstall --no-cache-dir 'llama-cpp-python~={_TESTED}'"
        ) from error
    return llama_cpp


L: Any = _import()
"""llama_cpp's low-level module: libllama's functions and structs."""


def _open_ggml() -> ctypes.CDLL:
    """The ggml libraries that libllama itself uses.

    Looked up through libllama: a wheel holds each library three times, as ``.so``, ``.so.0`` and so on, and
    another file would be loaded as another library with a registry of its own.
    """
    path = str(L._lib._name)
    if os.name == "nt":  # there a library answers for itself only
        path = str(Path(L.__file__).parent / "lib" / "ggml-base.dll")
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise LibraryError(_broken(f"its ggml cannot be loaded ({error})")) from error


GGML: Any = _open_ggml()
"""ggml's functions, those that llama_cpp leaves out."""

_P, _Z, _B = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool
_GGML_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ggml_get_name": (ctypes.c_char_p, [_P]),
    "ggml_get_data": (_P, [_P]),
    "ggml_nbytes": (_Z, [_P]),
    "ggml_backend_tensor_get": (None, [_P, _P, _Z, _Z]),
    "ggml_backend_tensor_set": (None, [_P, _P, _Z, _Z]),
    "ggml_type_name": (ctypes.c_char_p, [ctypes.c_int]),
    "ggml_version": (ctypes.c_char_p, []),
    "ggml_backend_buft_name": (ctypes.c_char_p, [_P]),
    "ggml_backend_cpu_reg": (_P, []),
    "ggml_backend_reg_dev_get": (_P, [_P, _Z]),
    "ggml_backend_reg_get_proc_address": (_P, [_P, ctypes.c_char_p]),
}
_LLAMA_FUNCTIONS = (
    "llama_log_set",
    "llama_backend_init",
    "llama_model_default_params",
    "llama_context_default_params",
    "llama_model_load_from_file",
    "llama_model_free",
    "llama_init_from_model",
    "llama_free",
    "llama_decode",
    "llama_encode",
    "llama_get_logits",
    "llama_get_embeddings",
    "llama_get_embeddings_seq",
    "llama_get_memory",
    "llama_memory_seq_rm",
    "llama_memory_seq_cp",
    "llama_memory_seq_add",
    "llama_memory_seq_pos_min",
    "llama_memory_seq_pos_max",
    "llama_memory_clear",
    "llama_memory_can_shift",
    "llama_state_seq_get_size",
    "llama_state_seq_get_data",
    "llama_state_seq_set_data",
    "llama_tokenize",
    "llama_token_to_piece",
    "llama_sampler_chain_init",
    "llama_sampler_chain_add",
    "llama_sampler_apply",
    "llama_sampler_accept",
    "llama_sampler_free",
    "llama_adapter_lora_init",
    "llama_set_adapters_lora",
    "llama_set_abort_callback",
    "llama_vocab_is_eog",
    "llama_model_chat_template",
    "llama_model_quantize",
    "llama_n_ctx_seq",
)


def _check_functions() -> None:
    for name, (result, arguments) in _GGML_FUNCTIONS.items():
        try:
            function = getattr(GGML, name)
        except AttributeError:
            raise LibraryError(_broken(f"ggml has no function {name}")) from None
        function.restype, function.argtypes = result, arguments
    for name in _LLAMA_FUNCTIONS:
        if not hasattr(L, name):
            raise LibraryError(_broken(f"llama_cpp has no function {name}"))


def _broken(what: str) -> str:
    version = importlib.metadata.version("llama-cpp-python")
    return (
        f"llama-cpp-python {version} is not what llamaherd relies on: {what}; "
        f"install the tested one: pip install llama-cpp-python=={_TESTED}"
    )


def _check_structs() -> None:
    """Compare llama.cpp's default parameters, read through llama_cpp's structs, with what they must be.

    A field that llama.cpp added or removed without llama_cpp's struct following shifts every later field,
    so values at the beginning and at the end of each struct give it away.
    """
    model = L.llama_model_default_params()
    context = L.llama_context_default_params()
    expected: list[tuple[str, Any, Any]] = [
        ("llama_model_params.main_gpu", model.main_gpu, 0),
        ("llama_model_params.vocab_only", model.vocab_only, False),
        ("llama_model_params.check_tensors", model.check_tensors, False),
        ("llama_model_params.use_extra_bufts", model.use_extra_bufts, True),
        ("llama_model_params.no_alloc", model.no_alloc, False),
        ("llama_context_params.n_ctx", context.n_ctx, 512),
        ("llama_context_params.n_batch", context.n_batch, 2048),
        ("llama_context_params.n_ubatch", context.n_ubatch, 512),
        ("llama_context_params.n_seq_max", context.n_seq_max, 1),
        ("llama_context_params.type_k", context.type_k, 1),
        ("llama_context_params.type_v", context.type_v, 1),
        ("llama_context_params.embeddings", context.embeddings, False),
        ("llama_context_params.offload_kqv", context.offload_kqv, True),
        ("llama_context_params.swa_full", context.swa_full, True),
        ("llama_context_params.kv_unified", context.kv_unified, False),
        ("llama_context_params.n_samplers", context.n_samplers, 0),
    ]
    for name, found, wanted in expected:
        if found != wanted:
            raise LibraryError(_broken(f"{name} is {found!r} by default, not {wanted!r} (struct layout?)"))
    # llama_token_data is filled through a numpy structure of the same layout
    if ctypes.sizeof(L.llama_token_data) != 12:
        raise LibraryError(_broken(f"llama_token_data has {ctypes.sizeof(L.llama_token_data)} bytes, not 12"))


_recent: collections.deque[tuple[int, str]] = collections.deque(maxlen=64)
_last_level = logging.DEBUG


def _on_log(level: int, text: bytes, _user_data: Any) -> None:
    # an exception must not travel into C, and logging may be half torn down at exit
    with contextlib.suppress(Exception):
        global _last_level
        if level != _CONTINUE:
            _last_level = _LEVELS.get(level, logging.DEBUG)
        if _last_level < logging.WARNING and not LOGGER.isEnabledFor(_last_level):
            return  # a load logs hundreds of lines
        message = text.decode("utf-8", "replace").rstrip("\n")
        if not message.strip(" ."):
            return
        if _last_level >= logging.WARNING:
            _recent.append((_last_level, message))
        LOGGER.log(_last_level, "%s", message)


_callback = L.llama_log_callback(_on_log)  # llama.cpp keeps the pointer: it must live as long as the process


def forget_log() -> None:
    """Forget what recent_log() would return, before a call whose log is wanted."""
    _recent.clear()


def recent_log() -> str:
    """llama.cpp's latest warnings and errors, at most eight lines."""
    return "\n".join(text for _, text in list(_recent)[-8:])


def _check_log() -> None:
    L.llama_log_set(_callback, None)
    _recent.clear()
    L.llama_model_load_from_file(b"", L.llama_model_default_params())
    if not _recent:
        raise LibraryError(_broken("its log callback is not called"))
    _recent.clear()


def _strlen() -> int:
    libc = ctypes.CDLL(None)
    return ctypes.cast(libc.strlen, ctypes.c_void_p).value or 0


strlen: int = _strlen()
"""Address of libc's strlen: an abort callback that needs no Python.

llama.cpp asks the abort callback about 600 times a forward; a Python function would take the GIL each time.
``strlen(flag)`` is 0 (false) while ``flag`` holds an empty string and 1 (true) once it holds one character.
"""


def library_info() -> dict[str, str]:
    """Versions and CPU features of what computes."""
    return {
        "llama_cpp_python": importlib.metadata.version("llama-cpp-python"),
        "ggml": (GGML.ggml_version() or b"").decode(),
        "system": L.llama_print_system_info().decode().strip(),
        "tested_with": _TESTED,
    }


_check_functions()
_check_structs()
L.llama_backend_init()
_check_log()
