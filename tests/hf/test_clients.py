"""Other people's programs, unmodified, on our model and on torch's: the same answers."""

from __future__ import annotations

import json

import pytest
import torch

WORDS = ["fox", "dog", "llama", "river", "hill", "star", "proof", "token"]


@pytest.fixture
def tasks(tmp_path):
    """A multiple-choice and a generating task on local data."""
    rows = [
        {"question": f"the quick {a} and the", "choices": [b, c, a], "answer": i % 3, "text": b}
        for i, (a, b, c) in enumerate(zip(WORDS, WORDS[1:], WORDS[2:], strict=False))
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}, "cache_dir": str(tmp_path)},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choice = {
        **common, "task": "local_choice", "output_type": "multiple_choice", "doc_to_choice": "choices",
        "doc_to_target": "answer", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    write = {
        **common, "task": "local_write", "output_type": "generate_until", "doc_to_target": "text",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    return [choice, write]


@pytest.mark.filterwarnings("ignore")
def test_lm_eval_gives_torchs_scores(pair, tokenizer, tasks):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    found = []
    for model in pair.models:
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3, max_length=128)
        results = lm_eval.simple_evaluate(lm, tasks=tasks, log_samples=True, bootstrap_iters=0)
        samples = {
            name: sorted((s["doc_id"], s["resps"]) for s in rows) for name, rows in results["samples"].items()
        }
        found.append((results["results"], samples))
    for name in ("local_choice", "local_write"):
        scores = [{k: v for k, v in f[0][name].items() if "," in k and isinstance(v, float)} for f in found]
        assert scores[0] == scores[1]
        assert scores[0]
    assert found[0][1]["local_write"] == found[1][1]["local_write"]
    for (_, a), (_, b) in zip(found[0][1]["local_choice"], found[1][1]["local_choice"], strict=True):
        for (one,), (two,) in zip(a, b, strict=True):
            assert float(one[0]) == pytest.approx(float(two[0]), abs=2e-3)


@pytest.mark.filterwarnings("ignore")
def test_lm_eval_rolling_perplexity(pair, tokenizer):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    text = "the quick brown fox jumps over the lazy dog and the herd of llamas rests. " * 4
    values = []
    for model in pair.models:
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, max_length=64)
        request = Instance("loglikelihood_rolling", {}, (text,), 0)
        values.append(lm.loglikelihood_rolling([request])[0])
    assert values[0] == pytest.approx(values[1], abs=1e-2)


@pytest.mark.filterwarnings("ignore")
def test_outlines_constrains_the_text(pair, tokenizer):
    outlines = pytest.importorskip("outlines")
    import re

    model = outlines.from_transformers(pair.ours, tokenizer)
    pattern = r"[0-9]{3}-[a-c]{2}"
    text = outlines.Generator(model, outlines.types.Regex(pattern))("a number:", max_new_tokens=12)
    assert re.fullmatch(pattern, text)
    choice = outlines.Generator(model, outlines.types.Choice(["yes", "no"]))("well?", max_new_tokens=5)
    assert choice in ("yes", "no")


def test_torch_no_grad_and_inference_mode(pair):
    ids = torch.tensor([[20, 30, 40]])
    with torch.inference_mode():
        inside = pair.ours.generate(ids, max_new_tokens=4, eos_token_id=None)
    assert torch.equal(inside, pair.ours.generate(ids, max_new_tokens=4, eos_token_id=None))
