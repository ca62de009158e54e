"""Models, vocabularies and LoRA adapters, as Python values; the pointers stay in handles."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from itertools import compress, repeat
from typing import Any

from .handles import Handle
from .kernels import enable_kernels
from .library import L
from .params import model_params

__all__ = [
    "chat_template",
    "end_tokens",
    "load_adapter",
    "load_model",
    "model_facts",
    "model_metadata",
    "token_attributes",
    "token_piece",
    "token_score",
    "tokenize",
    "vocabulary_facts",
]

Progress = Callable[[float], bool]


def load_model(path: str, params: Mapping[str, Any], progress: Progress | None = None) -> Handle | None:
    """llama_model_load_from_file; None if llama.cpp refuses (its log says why).

    ``progress`` gets 0..1 and returns whether to go on.
    """
    enable_kernels()
    struct, keep = model_params(params)
    if progress is not None:
        callback = L.llama_progress_callback(lambda share, _: bool(progress(float(share))))
        struct.progress_callback = callback
        keep.append(callback)
    pointer = L.llama_model_load_from_file(os.fsencode(path), struct)
    return Handle(pointer, L.llama_model_free, "model", tuple(keep)) if pointer else None


def model_facts(model: Handle) -> dict[str, Any]:
    """What llama.cpp says of a model, by the names of its functions."""
    p = model.pointer
    description = ctypes.create_string_buffer(256)
    L.llama_model_desc(p, description, 256)
    n_layer = int(L.llama_model_n_layer(p))
    return {
        "description": description.value.decode("utf-8", "replace"),
        "n_params": int(L.llama_model_n_params(p)),
        "size": int(L.llama_model_size(p)),
        "n_ctx_train": int(L.llama_model_n_ctx_train(p)),
        "n_embd": int(L.llama_model_n_embd(p)),
        "n_embd_out": int(L.llama_model_n_embd_out(p)),
        "n_layer": n_layer,
        # without layers (vocab_only) these two abort the process
        "n_head": int(L.llama_model_n_head(p)) if n_layer else 0,
        "n_head_kv": int(L.llama_model_n_head_kv(p)) if n_layer else 0,
        "n_swa": int(L.llama_model_n_swa(p)),
        "has_encoder": bool(L.llama_model_has_encoder(p)),
        "has_decoder": bool(L.llama_model_has_decoder(p)),
        "is_recurrent": bool(L.llama_model_is_recurrent(p)),
        "is_hybrid": bool(L.llama_model_is_hybrid(p)),
        "decoder_start_token": int(L.llama_model_decoder_start_token(p)),
    }


def _text(call: Callable[[Any, int], int]) -> str | None:
    """Read a text whose length is not known beforehand: snprintf style, None if there is none."""
    size = 256
    while True:
        buffer = ctypes.create_string_buffer(size)
        n = call(buffer, size)
        if n < 0:
            return None
        if n < size:
            return buffer.raw[:n].decode("utf-8", "replace")
        size = n + 1


def model_metadata(model: Handle) -> dict[str, str]:
    """All scalar metadata as llama.cpp prints it."""
    p = model.pointer
    result = {}
    for i in range(L.llama_model_meta_count(p)):
        key = _text(lambda b, n, i=i: L.llama_model_meta_key_by_index(p, i, b, n))  # type: ignore[misc]
        value = _text(lambda b, n, i=i: L.llama_model_meta_val_str_by_index(p, i, b, n))  # type: ignore[misc]
        if key is not None:
            result[key] = value or ""
    return result


def chat_template(model: Handle, name: str | None = None) -> str | None:
    """The model's chat template (Jinja), or the one of that name."""
    owner = model.pointer
    text = L.llama_model_chat_template(owner, name.encode() if name else None)
    return text.decode("utf-8", "replace") if text else None


# ------------------------------------------------------------------------------------ vocabulary


def vocabulary_facts(model: Handle) -> dict[str, Any]:
    """Special tokens and flags of a model's vocabulary; -1 where there is none."""
    owner = model.pointer
    v = L.llama_model_get_vocab(owner)
    names = ("bos", "eos", "eot", "sep", "nl", "pad", "mask", "fim_pre", "fim_suf", "fim_mid")
    facts: dict[str, Any] = {name: int(getattr(L, f"llama_vocab_{name}")(v)) for name in names}
    facts["n_tokens"] = int(L.llama_vocab_n_tokens(v))
    facts["type"] = int(L.llama_vocab_type(v))
    facts["add_bos"] = bool(L.llama_vocab_get_add_bos(v))
    facts["add_eos"] = bool(L.llama_vocab_get_add_eos(v))
    return facts


_is_eog = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int32)(
    ctypes.cast(L.llama_vocab_is_eog, ctypes.c_void_p).value or 0
)  # called for every token: without llama_cpp's conversions


def end_tokens(model: Handle) -> frozenset[int]:
    """The tokens that end a generation (llama_vocab_is_eog); asks for each, milliseconds in all."""
    owner = model.pointer
    v = L.llama_model_get_vocab(owner)
    n = int(L.llama_vocab_n_tokens(v))
    return frozenset(compress(range(n), map(_is_eog, repeat(v, n), range(n))))


def tokenize(model: Handle, text: bytes, *, add_special: bool, parse_special: bool) -> list[int]:
    """llama_tokenize."""
    owner = model.pointer
    v = L.llama_model_get_vocab(owner)
    size = len(text) + 8
    while True:
        buffer = (ctypes.c_int32 * size)()
        n = L.llama_tokenize(v, text, len(text), buffer, size, add_special, parse_special)
        if n >= 0:
            return buffer[:n]
        if n == -(2**31):
            raise OverflowError("the text has more tokens than an int32 can count")
        size = -n


def token_piece(model: Handle, token: int, *, special: bool) -> bytes:
    """llama_token_to_piece: the bytes of a token; ``special`` renders control tokens too."""
    owner = model.pointer
    v = L.llama_model_get_vocab(owner)
    size = 64
    while True:
        buffer = ctypes.create_string_buffer(size)
        n = L.llama_token_to_piece(v, token, buffer, size, 0, special)
        if n >= 0:
            return buffer.raw[:n]
        size = -n


def token_attributes(model: Handle, token: int) -> int:
    """llama_vocab_get_attr: LLAMA_TOKEN_ATTR_* flags."""
    owner = model.pointer
    return int(L.llama_vocab_get_attr(L.llama_model_get_vocab(owner), token))


def token_score(model: Handle, token: int) -> float:
    """llama_vocab_get_score."""
    owner = model.pointer
    return float(L.llama_vocab_get_score(L.llama_model_get_vocab(owner), token))


# -------------------------------------------------------------------------------------- adapters


def load_adapter(model: Handle, path: str) -> Handle | None:
    """llama_adapter_lora_init; None if llama.cpp refuses."""
    pointer = L.llama_adapter_lora_init(model.pointer, os.fsencode(path))
    return Handle(pointer, L.llama_adapter_lora_free, "adapter", (model.pointer,)) if pointer else None
