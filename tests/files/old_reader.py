"""Run a model of before GGUF in a llama-cpp-python of its time (0.1.48, 0.1.57 or 0.1.78).

Usage: python then.py FILE N_PREDICT TOKEN... ; prints {"logits": [...], "greedy": [...]}.
Runs under those versions' own interpreter and knows nothing of this project.
"""

import ctypes
import json
import os
import sys

import llama_cpp as lc


def main():
    path, n_predict, tokens = sys.argv[1], int(sys.argv[2]), [int(t) for t in sys.argv[3:]]
    params = lc.llama_context_default_params()
    params.n_ctx, params.f16_kv = 256, False
    if hasattr(params, "n_gqa"):
        params.n_gqa = int(os.environ.get("N_GQA", "1"))
    if hasattr(params, "rms_norm_eps"):
        params.rms_norm_eps = 5e-6
    if hasattr(lc, "llama_load_model_from_file"):
        model = lc.llama_load_model_from_file(path.encode(), params)
        context = lc.llama_new_context_with_model(model, params)
    else:
        context = lc.llama_init_from_file(path.encode(), params)
    n_vocab = lc.llama_n_vocab(context)
    first = None
    greedy, n_past, batch = [], 0, tokens
    for _ in range(n_predict + 1):
        array = (lc.llama_token * len(batch))(*batch)
        code = lc.llama_eval(context, array, ctypes.c_int(len(batch)), ctypes.c_int(n_past), ctypes.c_int(1))
        if code:
            raise RuntimeError(f"llama_eval returned {code}")
        n_past += len(batch)
        logits = lc.llama_get_logits(context)[:n_vocab]
        if first is None:
            first = logits
        batch = [max(range(n_vocab), key=logits.__getitem__)]
        greedy.append(batch[0])
    print(json.dumps({"logits": first, "greedy": greedy[:n_predict]}))


main()
