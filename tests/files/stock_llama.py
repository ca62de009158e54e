"""Stock llama.cpp as an oracle: a process of its own that loads files and decodes, over JSON lines.

Run as a script it is the process; imported, `StockLlama` talks to it. A file that makes libllama abort
ends that process only, and the test that asked gets a `StockLlamaDiedError`.
"""

from __future__ import annotations

import json
import os
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
    import llama_cpp as L  # noqa: N812
    import numpy as np

    log: list[str] = []
    callback = L.llama_log_callback(lambda level, text, data: log.append(text.decode(errors="replace")))
    L.llama_log_set(callback, None)
    L.llama_backend_init()

    def tokenize(vocab: Any, text: str, special: bool) -> list[int]:
        raw = text.encode()
        out = (L.llama_token * (len(raw) + 8))()
        n = L.llama_tokenize(vocab, raw, len(raw), out, len(out), special, True)
        return list(out[:n])

    def detokenize(vocab: Any, tokens: list[int]) -> str:
        import ctypes

        ids = (L.llama_token * max(len(tokens), 1))(*tokens)
        out = ctypes.create_string_buffer(16 * len(tokens) + 64)
        n = L.llama_detokenize(vocab, ids, len(tokens), out, len(out), False, True)
        return out.raw[: max(n, 0)].decode(errors="replace")

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        log.clear()
        params = L.llama_model_default_params()
        model = L.llama_model_load_from_file(request["path"].encode(), params)
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

    for line in sys.stdin:
        try:
            result = answer(json.loads(line))
        except Exception as error:  # the test must see whatever went wrong
            result = {"error": f"{type(error).__name__}: {error}", "log": "".join(log)[-2000:]}
        sys.stdout.write(f"{_MARK}{json.dumps(result)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
