"""Beam search against transformers' on the same weights: torch, fp32, from the same f16 GGUF."""

import numpy as np
import pytest

from llamaherd import Context, GenerationRequest, Herd, Model
from llamaherd.native.quantize import quantize_file

pytestmark = [pytest.mark.real, pytest.mark.slow]

PROMPTS = [
    "The capital of France is",
    "theorem add_comm (a b : Nat) : a + b = b + a := by",
    "Once upon a time there was",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
]
WIDTH, LENGTH = 4, 12


@pytest.mark.timeout(1200)
def test_beams_equal_transformers(demo_model_path, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = tmp_path / "f16.gguf"
    quantize_file(str(demo_model_path), str(path), "f16")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file="f16.gguf", dtype=torch.float32
    )
    # f32 KV and no flash attention: as near to fp32 as llama.cpp comes
    exact = {"type_k": "f32", "type_v": "f32", "flash_attn_type": "disabled"}
    with Model.load(path) as model:
        with Herd(model, n_ctx=1024, max_sequences=WIDTH, **exact) as herd:
            ours = [
                herd.generate(GenerationRequest(p, beams=WIDTH, n=WIDTH, max_tokens=LENGTH)).completions
                for p in PROMPTS
            ]
        prompts = [model.vocabulary.encode_prompt(p) for p in PROMPTS]
        end = sorted(model.vocabulary.end_tokens)
    for prompt, completions in zip(prompts, ours, strict=True):
        theirs = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=LENGTH,
            num_beams=WIDTH,
            num_return_sequences=WIDTH,
            do_sample=False,
            length_penalty=1.0,
            early_stopping=False,
            eos_token_id=end,
            pad_token_id=end[0],
            return_dict_in_generate=True,
            output_scores=True,
        )
        for completion, row, score in zip(
            completions, theirs.sequences.tolist(), theirs.sequences_scores.tolist(), strict=True
        ):
            tokens = row[len(prompt) : len(prompt) + len(completion.tokens)]
            close = abs(completion.score - score) < 1e-3
            assert close, (completion, score)
            # the same beams in the same order, unless two scores lie within rounding of each other
            if list(completion.tokens) != tokens:
                others = [c.score for c in completions if c is not completion]
                assert min(abs(completion.score - s) for s in others) < 1e-3


def test_logits_agree_with_torch(demo_model_path, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from llamaherd.engine.protocol import Batch

    path = tmp_path / "f16.gguf"
    quantize_file(str(demo_model_path), str(path), "f16")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file="f16.gguf", dtype=torch.float32
    )
    with Model.load(path) as model:
        tokens = np.array(model.vocabulary.encode_prompt(PROMPTS[1]), np.int32)
        n = len(tokens)
        with Context(model, n_ctx=256, type_k="f32", type_v="f32", flash_attn_type="disabled") as context:
            sequence = context.memory.allocate()
            batch = Batch(
                tokens, np.arange(n, dtype=np.int32), np.full(n, sequence, np.int32), np.ones(n, np.bool_)
            )
            ours = context.decode(batch).copy()
    with torch.no_grad():
        theirs = reference(torch.tensor(tokens[None].astype(np.int64))).logits[0].numpy()
    assert np.abs(ours - theirs).max() < 0.1
