"""Each decoding mode against the same mode of transformers on the torch model (ten prompts: test_real)."""

from __future__ import annotations

import pytest
import torch
from tests.hf.comparing import same_tokens
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

from llamaherd.errors import UnsupportedError
from llamaherd.hf import LlamaCppCache, LlamaCppTokenizer

NEW = 10

MODES = {
    "greedy": {},
    "beams": {"num_beams": 4},
    "beams-3": {"num_beams": 4, "num_return_sequences": 3},
    "beams-length": {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True},
    "cfg": {"guidance_scale": 1.7},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "lookup": {"prompt_lookup_num_tokens": 4},
    "min-tokens": {"min_new_tokens": 10},
    "bad-words": {"bad_words_ids": [[30], [41, 52]]},
    "suppress": {"suppress_tokens": list(range(10, 60))},
    "chunked-prefill": {"prefill_chunk_size": 7},
    "no-cache": {"use_cache": False},
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_equal_torch(mode, pair, prompts):
    equal = 0
    for prompt in prompts[::2]:
        ids = torch.tensor([prompt])
        ours, theirs = (
            m.generate(ids, max_new_tokens=NEW, eos_token_id=[7, 9], pad_token_id=0, **MODES[mode])
            for m in pair.models
        )
        assert ours.shape == theirs.shape
        equal += all(same_tokens(a, b, pair.models) for a, b in zip(ours, theirs, strict=True))
    assert equal >= 4


@pytest.mark.parametrize("mode", ["greedy", "beams", "beams-3", "penalties"])
def test_padded_batches_equal_torch_and_single_prompts(mode, pair, batch, prompts):
    options = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0, **MODES[mode]}
    ours, theirs = (m.generate(**batch, **options) for m in pair.models)
    assert torch.equal(ours, theirs)
    if mode == "greedy":
        for prompt, row in zip(prompts, ours, strict=True):
            alone = pair.ours.generate(torch.tensor([prompt]), **options)
            assert torch.equal(alone[0, len(prompt) :], row[-NEW:])


def test_negative_prompts_in_a_padded_batch_equal_single_ones(pair, prompts):
    width = 20
    rows = [prompts[0], prompts[5]]
    ids = torch.tensor([[0] * (width - len(p)) + p for p in rows])
    mask = (ids != 0).long()
    negative = torch.tensor([[77, 88, 99]])
    options = {"guidance_scale": 2.0, "max_new_tokens": 10, "eos_token_id": None, "pad_token_id": 0}
    together = pair.ours.generate(
        ids, attention_mask=mask, negative_prompt_ids=negative.repeat(2, 1), **options
    )
    for prompt, row in zip(rows, together, strict=True):
        alone = pair.theirs.generate(torch.tensor([prompt]), negative_prompt_ids=negative, **options)
        assert torch.equal(alone[0, len(prompt) :], row[width:])


def test_guidance_takes_one_decode_a_token(pair, prompts, monkeypatch):
    calls = []
    run = pair.ours.runtime.context.run
    monkeypatch.setattr(
        pair.ours.runtime.context, "run", lambda *a, **k: calls.append(len(a[0])) or run(*a, **k)
    )
    pair.ours.generate(torch.tensor([prompts[2]]), guidance_scale=1.5, max_new_tokens=6, eos_token_id=None)
    assert calls == [len(prompts[2]) + 1, 2, 2, 2, 2, 2]


def test_guided_beams_equal_recomputing_both_branches(pair, prompts):
    """transformers forgets to reorder the second cache; the oracle here has none."""
    ids, negative = torch.tensor([prompts[4]]), torch.tensor([[60, 70, 80, 90]])

    class Guided(LogitsProcessor):
        def __call__(self, input_ids, scores):
            new = input_ids[:, ids.shape[1] :]
            full = torch.cat([negative.expand(len(new), -1), new], 1)
            logits = pair.theirs(full).logits[:, -1].detach().log_softmax(-1)
            scores = scores.log_softmax(-1)
            return 1.5 * (scores - logits) + logits

    options = {"num_beams": 3, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}
    theirs = pair.theirs.generate(ids, logits_processor=LogitsProcessorList([Guided()]), **options)
    ours = pair.ours.generate(ids, guidance_scale=1.5, negative_prompt_ids=negative, **options)
    assert torch.equal(ours, theirs)


def test_sampling_equals_torch_seed_for_seed(pair, batch):
    for options in (
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"min_p": 0.05, "typical_p": 0.9},
        {"num_beams": 3, "temperature": 1.1},
        {"num_return_sequences": 3, "epsilon_cutoff": 1e-3},
    ):
        rows = []
        for model in pair.models:
            torch.manual_seed(11)
            rows.append(
                model.generate(
                    **batch, do_sample=True, max_new_tokens=8, eos_token_id=None, pad_token_id=0, **options
                )
            )
        assert torch.equal(rows[0], rows[1]), options


@pytest.mark.parametrize("assistant", ["ours", "theirs"])
@pytest.mark.parametrize("sample", [False, True])
def test_assisted_decoding_equals_torch(assistant, sample, pair, pairs, prompts):
    draft = getattr(pairs("qwen2"), assistant)  # another model with the same vocabulary
    for prompt in prompts[:3]:
        rows = []
        for model in pair.models:
            torch.manual_seed(5)
            rows.append(
                model.generate(
                    torch.tensor([prompt]), assistant_model=draft, max_new_tokens=NEW, do_sample=sample,
                    eos_token_id=None, pad_token_id=0,
                )
            )  # fmt: skip
        assert torch.equal(rows[0], rows[1])


def test_contrastive_search_equals_the_paper(pair, prompts):
    """The reference computes every candidate's whole text in torch, without any cache."""
    for prompt in prompts[:6]:
        text = list(prompt)
        for _ in range(8):
            text.append(_contrastive_step(pair.theirs, text, alpha=0.6, k=4))
        ours = pair.ours.generate(
            torch.tensor([prompt]), penalty_alpha=0.6, top_k=4, max_new_tokens=8, eos_token_id=None
        )
        assert ours[0].tolist() == text
        greedy = pair.ours.generate(torch.tensor([prompt]), max_new_tokens=8, eos_token_id=None)
        if not torch.equal(greedy, ours):
            break
    else:
        pytest.fail("contrastive search never differed from greedy: the test shows nothing")


def _contrastive_step(model, text, *, alpha, k):
    with torch.no_grad():
        out = model(torch.tensor([text]), output_hidden_states=True)
        top = out.logits[0, -1].softmax(-1).topk(k)
        before = torch.nn.functional.normalize(out.hidden_states[-1][0], dim=-1)
        best, choice = -torch.inf, None
        for probability, token in zip(top.values, top.indices, strict=True):
            last = model(torch.tensor([[*text, int(token)]]), output_hidden_states=True).hidden_states[-1][
                0, -1
            ]
            penalty = (before @ torch.nn.functional.normalize(last, dim=-1)).max()
            score = (1 - alpha) * probability - alpha * penalty
            if score > best:
                best, choice = score, int(token)
    return choice


def test_contrastive_search_in_a_padded_batch_and_as_custom_generate(pair, batch, prompts):
    from llamaherd.hf import contrastive_search

    options = {"penalty_alpha": 0.5, "top_k": 3, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    rows = {k: v[:6] for k, v in batch.items()}
    together = pair.ours.generate(**rows, custom_generate=contrastive_search, **options)
    for prompt, row in zip(prompts[:6], together, strict=True):
        alone = pair.ours.generate(torch.tensor([prompt]), **options)
        assert torch.equal(alone[0, len(prompt) :], row[-6:])
    out = pair.ours.generate(
        **rows, **options, return_dict_in_generate=True, output_scores=True, output_hidden_states=True
    )
    assert torch.equal(out.sequences, together)
    assert len(out.scores) == len(out.hidden_states) == 6
    assert out.cache.get_seq_length() == out.sequences.shape[1] - 1


def test_scores_logits_and_transition_scores_equal_torch(pair, batch):
    outs = [
        m.generate(
            **batch, max_new_tokens=6, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True,
            output_scores=True, output_logits=True, output_hidden_states=True, repetition_penalty=1.2,
        )
        for m in pair.models
    ]  # fmt: skip
    for a, b in zip(outs[0].scores, outs[1].scores, strict=True):
        assert (a - b).abs().max() < 1e-3
    for a, b in zip(outs[0].logits, outs[1].logits, strict=True):
        assert (a - b).abs().max() < 1e-3
    transitions = [
        m.compute_transition_scores(o.sequences, o.scores, normalize_logits=True)
        for m, o in zip(pair.models, outs, strict=True)
    ]
    assert (transitions[0] - transitions[1]).abs().max() < 1e-3
    for step_a, step_b in zip(outs[0].hidden_states, outs[1].hidden_states, strict=True):
        for a, b in zip(step_a, step_b, strict=True):
            assert a.shape == b.shape
            real = a.abs().sum(-1) > 0  # padding is not computed
            assert (a - b)[real].abs().max() < 1e-3


def test_callbacks_streamers_and_stop_strings(pair, tokenizer):
    inputs = tokenizer(["the quick brown"], return_tensors="pt")
    plain = pair.ours.generate(**inputs, max_new_tokens=20, eos_token_id=None)
    text = tokenizer.decode(plain[0, inputs.input_ids.shape[1] :])

    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    pair.ours.generate(**inputs, max_new_tokens=20, eos_token_id=None, streamer=streamer)
    assert "".join(streamer) == text

    class After(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= inputs.input_ids.shape[1] + 5)

    stopped = pair.ours.generate(
        **inputs, max_new_tokens=20, eos_token_id=None, stopping_criteria=StoppingCriteriaList([After()])
    )
    assert torch.equal(stopped, plain[:, : inputs.input_ids.shape[1] + 5])

    allowed = pair.ours.generate(
        **inputs, max_new_tokens=6, eos_token_id=None, prefix_allowed_tokens_fn=lambda row, ids: [40, 41]
    )
    assert set(allowed[0, -6:].tolist()) <= {40, 41}

    stop = text[4:6]
    with_stop = pair.ours.generate(
        **inputs, max_new_tokens=20, eos_token_id=None, stop_strings=[stop], tokenizer=tokenizer
    )
    shown = tokenizer.decode(with_stop[0, inputs.input_ids.shape[1] :])
    assert stop in shown
    assert len(with_stop[0]) < len(plain[0])


def test_equal_rows_are_decoded_once_and_padding_never(pair, batch, monkeypatch):
    tokens = []
    run = pair.ours.runtime.context.run
    monkeypatch.setattr(
        pair.ours.runtime.context, "run", lambda *a, **k: tokens.append(len(a[0])) or run(*a, **k)
    )
    pair.ours.generate(**batch, num_beams=4, max_new_tokens=2, eos_token_id=None, pad_token_id=0)
    assert tokens[0] == int(batch["attention_mask"].sum())
    assert tokens[1] == 40


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache_implementation": "quantized"}, "type_k"),
        ({"cache_implementation": "offloaded"}, "offload_kqv"),
        ({"cache_implementation": "offloaded_static"}, "offload_kqv"),
        ({"cache_implementation": "paged"}, "padded batch"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "attention weights"),
        ({"assistant_early_exit": 1}, "prompt_lookup"),
        ({"dola_layers": "high"}, "prompt_lookup"),
        ({"guidance_scale": 2.0, "prompt_lookup_num_tokens": 3}, "guidance_scale"),
    ],
)
def test_what_cannot_be_says_what_to_do(options, words, pair):
    with pytest.raises(UnsupportedError, match=words):
        pair.ours.generate(torch.tensor([[20, 30]]), max_new_tokens=3, **options)


def test_static_is_what_the_cache_already_is(pair):
    ids = torch.tensor([[20, 30, 40]])
    plain = pair.ours.generate(ids, max_new_tokens=5, eos_token_id=None)
    static = pair.ours.generate(ids, max_new_tokens=5, eos_token_id=None, cache_implementation="static")
    assert torch.equal(plain, static)


def test_other_caches_are_refused(pair, pairs):
    from transformers import DynamicCache

    ids = torch.tensor([[20, 30, 40]])
    for cache in (DynamicCache(), LlamaCppCache(pairs("qwen2").ours)):
        with pytest.raises(ValueError, match="LlamaCppCache"):
            pair.ours.generate(ids, max_new_tokens=3, cache=cache)


def test_nothing_is_held_after_generate(pair, batch):
    import gc

    gc.collect()
    pair.ours.runtime.collect()
    before = pair.ours.runtime.context.memory.free_sequences
    for options in ({}, {"num_beams": 4}, {"guidance_scale": 2.0}):
        pair.ours.generate(**batch, max_new_tokens=3, eos_token_id=None, pad_token_id=0, **options)
    pair.ours.runtime.collect()
    gc.collect()
    pair.ours.runtime.collect()
    assert pair.ours.runtime.context.memory.free_sequences == before


@pytest.mark.parametrize("assistant", ["ours", "theirs"])
def test_an_assistant_with_another_tokenizer(assistant, pair, pairs, tokenizer, tiny):
    other = LlamaCppTokenizer.from_pretrained(tiny("mistral"))
    draft = getattr(pairs("mistral"), assistant)
    inputs = tokenizer("the quick brown fox jumps over", return_tensors="pt")
    options = {"max_new_tokens": 10, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    plain = pair.ours.generate(**inputs, **options)
    assisted = pair.ours.generate(
        **inputs, **options, assistant_model=draft, tokenizer=tokenizer, assistant_tokenizer=other
    )
    assert torch.equal(plain, assisted)
