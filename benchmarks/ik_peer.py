"""ik_llama.cpp as a peer of kernel_models.py, run by an interpreter that has the ik-llama-cpp-python wheel.

It cannot live beside llama-cpp-python in a process: both bring a libllama and a libggml.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import numpy as np
from ik_llama_cpp import _ctypes_api as ik

from model_work import N_BATCH, N_CTX, N_SEQ_MAX, Ints, serve


class IkEngine:
    """An Engine of model_work.py. ``repack``: weights in ik's own layouts, made when the file is loaded."""

    def __init__(self, path: str, threads: int, repack: bool) -> None:
        ik.llama_backend_init()
        model_params = ik.llama_model_default_params()
        model_params.repack_tensors = repack
        model = ik.llama_model_load_from_file(path.encode(), model_params)
        if not model:
            sys.exit("ik_llama.cpp does not load this file")
        params = ik.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = N_CTX, N_BATCH, N_BATCH
        params.n_seq_max = N_SEQ_MAX
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn = True
        self._context = ik.llama_init_from_model(model, params)
        if not self._context:
            sys.exit("ik_llama.cpp makes no context")
        self.n_vocab: int = ik.llama_vocab_n_tokens(ik.llama_model_get_vocab(model))
        self._batch = ik.llama_batch_init(N_BATCH, 0, 1)
        # the wheel's Python has no names for these
        library = next(value for value in vars(ik).values() if isinstance(value, ctypes.CDLL))
        ints = [ctypes.c_int32] * 4
        self._copy = _function(library.llama_kv_cache_seq_cp, None, [ctypes.c_void_p, *ints])
        self._remove = _function(library.llama_kv_cache_seq_rm, ctypes.c_bool, [ctypes.c_void_p, *ints[1:]])

    def start(self) -> None:
        ik.llama_kv_cache_clear(self._context)

    def compute(self, tokens: Ints, positions: Ints, sequences: Ints, every: bool) -> None:
        batch, n = self._batch, len(tokens)
        batch.n_tokens = n
        _array(batch.token, n)[:] = tokens
        _array(batch.pos, n)[:] = positions
        _array(batch.n_seq_id, n)[:] = 1
        for i, sequence in enumerate(sequences.tolist()):
            batch.seq_id[i][0] = sequence
        _array(batch.logits, n)[:] = every
        batch.logits[n - 1] = 1
        status = ik.llama_decode(self._context, batch)
        if status:
            sys.exit(f"ik_llama.cpp's llama_decode gave {status}")
        ik.llama_get_logits_ith(self._context, n - 1)  # waits for them

    def fork(self, n: int) -> None:
        for sequence in range(1, n):
            self._copy(self._context, 0, sequence, -1, -1)

    def rewind(self, n: int, depth: int) -> None:
        for sequence in range(1, n):
            self._remove(self._context, sequence, -1, -1)
        if not self._remove(self._context, 0, depth, -1):
            sys.exit("ik_llama.cpp cannot shorten this model's sequences")


def _function(function: Any, result: Any, arguments: list[Any]) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


def _array(pointer: Any, n: int) -> Any:
    return np.ctypeslib.as_array(pointer, (n,))


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    serve(IkEngine(request["path"], request["threads"], request["repack"]), request["threads"])
