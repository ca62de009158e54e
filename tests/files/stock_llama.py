"""Stock llama.cpp as an oracle: a process of its own that loads files and decodes, over JSON lines.

Run as a script it is the process; imported, `StockLlama` talks to it. A file that makes libllama abort
ends that process only, and the test that asked gets a `StockLlamaDiedError`.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

_MARK = "answer: "  # an aborting libllama prints to the same pipe


class StockLlamaDiedError(Exception):
    """libllama aborted the process."""


class StockLlama:
    """Ask a process that runs nothing of llamaherd's; it is started when needed and again after an abort."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, **request: Any) -> dict[str, Any]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "GGML_NO_BACKTRACE": "1"},
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request, default=str) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(_MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(_MARK))
                return answer
        code = self._process.wait()
        self.close()
        raise StockLlamaDiedError(f"the process ended with {code}")

    def close(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process.wait(timeout=30)
            self._process = None


# ------------------------------------------------------------------------------------- the process


def _serve() -> None:
    import llama_cpp as L
    import numpy as np

    log: list[str] = []
    callback = L.llama_log_callback(lambda level, text, data: log.append(text.decode(errors="replace")))
    L.llama_log_set(callback, None)
    L.llama_backend_init()

    def model_params() -> Any:
        params = L.llama_model_default_params()
        params.use_extra_bufts = False  # no repacking, and no AMX, which crashes in many builds
        return params

    def tokenize(vocab: Any, text: str, special: bool) -> list[int]:
        raw = text.encode()
        out = (L.llama_token * (len(raw) + 8))()
        n = L.llama_tokenize(vocab, raw, len(raw), out, len(out), special, True)
        return list(out[:n])

    def detokenize(vocab: Any, tokens: list[int]) -> str:
        ids = (L.llama_token * max(len(tokens), 1))(*tokens)
        out = ctypes.create_string_buffer(16 * len(tokens) + 64)
        n = L.llama_detokenize(vocab, ids, len(tokens), out, len(out), False, True)
        return out.raw[: max(n, 0)].decode(errors="replace")

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        log.clear()
        model = L.llama_model_load_from_file(request["path"].encode(), model_params())
        if not model:
            return {"loaded": False, "log": "".join(log)[-2000:]}
        vocab = L.llama_model_get_vocab(model)
        result: dict[str, Any] = {
            "loaded": True,
            "n_layer": L.llama_model_n_layer(model),
            "n_embd": L.llama_model_n_embd(model),
            "n_vocab": L.llama_vocab_n_tokens(vocab),
            "bos": L.llama_vocab_bos(vocab),
            "eos": L.llama_vocab_eos(vocab),
            "add_bos": L.llama_vocab_get_add_bos(vocab),
            "has_decoder": L.llama_model_has_decoder(model),
            "has_encoder": L.llama_model_has_encoder(model),
            "recurrent": L.llama_model_is_recurrent(model),
        }
        if "text" in request:
            tokens = tokenize(vocab, request["text"], False)
            result["tokens"] = tokens
            result["text"] = detokenize(vocab, tokens)
        if "prompt" in request:
            prompt = request["prompt"]
            if isinstance(prompt, str):
                prompt = tokenize(vocab, prompt, True)
            result.update(decode(model, vocab, prompt, request.get("n", 0), request.get("embeddings", False)))
        L.llama_model_free(model)
        return result

    def decode(model: Any, vocab: Any, prompt: list[int], n: int, embeddings: bool) -> dict[str, Any]:
        params = L.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = 512, 1, 1
        params.flash_attn_type = 0
        params.type_k = params.type_v = 0  # f32
        params.embeddings = embeddings
        context = L.llama_init_from_model(model, params)
        batch = L.llama_batch_init(512, 0, 1)
        n_vocab = L.llama_vocab_n_tokens(vocab)

        def forward(tokens: list[int], start: int) -> Any:
            batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, start + i, 1
                batch.seq_id[i][0], batch.logits[i] = 0, 1
            code = L.llama_decode(context, batch)
            if code:
                raise RuntimeError(f"llama_decode returned {code}")
            if embeddings:
                pointer = L.llama_get_embeddings_seq(context, 0)
                return np.ctypeslib.as_array(pointer, shape=(L.llama_model_n_embd(model),)).copy()
            pointer = L.llama_get_logits(context)
            return np.ctypeslib.as_array(pointer, shape=(len(tokens), n_vocab)).copy()

        try:
            if embeddings:
                return {"embedding": forward(prompt, 0).tolist()}
            logits = forward(prompt, 0)
            generated = []
            last = logits[-1]
            for step in range(n):
                generated.append(int(last.argmax()))
                last = forward([generated[-1]], len(prompt) + step)[-1]
            return {
                "logits": logits.tolist(),
                "generated": generated,
                "finite": bool(np.isfinite(logits).all()),
                "std": float(logits.std()),
            }
        finally:
            L.llama_batch_free(batch)
            L.llama_free(context)

    base = ctypes.CDLL(str(next((pathlib.Path(L.__file__).parent / "lib").glob("libggml-base.so*"))))
    base.ggml_get_name.restype, base.ggml_get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    base.ggml_nbytes.restype, base.ggml_nbytes.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
    get = base.ggml_backend_tensor_get
    get.restype, get.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]

    put = base.ggml_backend_tensor_set
    put.restype, put.argtypes = None, get.argtypes

    class Part:
        """One model of a chain: tokens or hidden states in, hidden states (or logits, if last) out."""

        def __init__(self, path: str, last: bool) -> None:
            self.model = L.llama_model_load_from_file(path.encode(), model_params())
            if not self.model:
                raise RuntimeError(f"cannot load {path}: {''.join(log)[-1500:]}")
            self.width, self.last = L.llama_model_n_embd(self.model), last
            self.n_vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(self.model))
            target = f"l_out-{L.llama_model_n_layer(self.model) - 1}".encode()
            self.hidden: Any = None
            self.input: Any = None
            text = ctypes.create_string_buffer(64)
            L.llama_model_meta_val_str(self.model, b"llamaherd.slice.input_node", text, 64)
            node = text.value or None

            def on_tensor(tensor: int, ask: bool, data: Any) -> bool:
                name = base.ggml_get_name(tensor)
                if ask:
                    return bool(name in (target, node))
                if name == node:
                    put(tensor, self.input.ctypes.data, 0, self.input.nbytes)
                    return True
                size = base.ggml_nbytes(tensor)
                self.hidden = np.empty(size // 4, np.float32)
                get(tensor, self.hidden.ctypes.data, 0, size)
                return True

            self.callback = L.ggml_backend_sched_eval_callback(on_tensor)
            params = L.llama_context_default_params()
            params.n_ctx, params.n_batch, params.n_ubatch = 512, 64, 64
            params.n_threads = params.n_threads_batch = 1
            if not last or node:
                params.cb_eval = self.callback
            self.context = L.llama_init_from_model(self.model, params)
            if not self.context:
                raise RuntimeError(f"no context for {path}: {''.join(log)[-1500:]}")
            self.by_token = L.llama_batch_init(64, 0, 1)
            self.by_state = L.llama_batch_init(64, self.width, 1)

        def forward(self, x: Any, start: int) -> Any:
            batch = self.by_token if x.ndim == 1 else self.by_state
            target = batch.token if x.ndim == 1 else batch.embd
            x = np.ascontiguousarray(x, np.int32 if x.ndim == 1 else np.float32)
            ctypes.memmove(target, x.ctypes.data, x.nbytes)
            self.input = x
            batch.n_tokens = len(x)
            for i in range(len(x)):
                batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = start + i, 1, 0, 1
            code = L.llama_decode(self.context, batch)
            if code:
                raise RuntimeError(f"llama_decode returned {code}")
            if self.last:
                pointer = L.llama_get_logits(self.context)
                return np.ctypeslib.as_array(pointer, shape=(len(x), self.n_vocab)).copy()
            if self.hidden is None:
                raise RuntimeError("this architecture has no l_out")
            return self.hidden.reshape(len(x), self.width)

        def free(self) -> None:
            L.llama_free(self.context)
            L.llama_model_free(self.model)

    def compare(request: dict[str, Any]) -> dict[str, Any]:
        """The largest difference of logits between a whole model and its slices in a chain."""
        log.clear()
        paths = request["parts"]
        whole = Part(request["path"], True)
        parts = [Part(path, i == len(paths) - 1) for i, path in enumerate(paths)]
        try:
            tokens = np.random.default_rng(0).integers(3, whole.n_vocab, request["n_prompt"])
            at, worst, spread = 0, 0.0, 0.0
            for _ in range(request["n"] + 1):
                exact = whole.forward(tokens, at)
                x: Any = tokens
                for part in parts:
                    x = part.forward(x, at)
                difference = np.abs(exact - x).max()  # NaN if either has one
                worst = max(worst, float(difference)) if np.isfinite(difference) else float("inf")
                spread = max(spread, float(exact.std()))
                at, tokens = at + len(tokens), exact[-1:].argmax(-1)
            return {"worst": worst, "spread": spread}
        finally:
            for part in (whole, *parts):
                part.free()

    for line in sys.stdin:
        try:
            request = json.loads(line)
            result = compare(request) if "parts" in request else answer(request)
        except Exception as error:  # the test must see whatever went wrong
            result = {"error": f"{type(error).__name__}: {error}", "log": "".join(log)[-2000:]}
        sys.stdout.write(f"{_MARK}{json.dumps(result)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
