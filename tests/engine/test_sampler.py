"""The vectorised truncations against llama.cpp's chain, and what chains do."""

import resource

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaherd.config import SamplingConfig
from llamaherd.engine.model import Model
from llamaherd.engine.sampler import Sampler, _add_truncation, _inverse_cdf, _truncate
from llamaherd.errors import ClosedError, GrammarError, LogitsError, RequestError, TokenError
from llamaherd.native.sampler import Candidates, Chain


def chain_left(config, logits):
    """Tokens and probabilities that llama.cpp's own chain leaves."""
    chain = Chain()
    _add_truncation(chain, config, len(logits))
    candidates = Candidates(len(logits))
    candidates.load(logits)
    candidates.apply(chain)
    left = candidates.left.copy()
    chain.close()
    weights = np.exp(left["logit"].astype(np.float64) - left["logit"].max())
    return dict(zip(left["id"].tolist(), (weights / weights.sum()).tolist(), strict=True))


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([5, 300, 3000]),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
    top_k=st.sampled_from([0, 1, 7, 40]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
@settings(max_examples=200, deadline=None)
def test_the_shorter_way_keeps_what_llama_cpp_keeps(seed, size, spread, top_k, top_p, min_p, temperature):
    config = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)
    theirs = chain_left(config, logits)
    kept = _truncate(config, logits)
    ours = set(range(size)) if kept is None else set(kept.tolist())
    # llama.cpp sums probabilities in another order: at the border of top-p one token may differ
    assert len(ours ^ set(theirs)) <= (1 if top_p < 1 else 0)
    if ours == set(theirs) and kept is not None:
        chosen = logits[kept].astype(np.float64) / temperature
        weights = np.exp(chosen - chosen.max())
        ours_p = dict(zip(kept.tolist(), (weights / weights.sum()).tolist(), strict=True))
        assert all(abs(ours_p[t] - p) < 1e-4 for t, p in theirs.items())


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=3000), st.floats(0, 1, exclude_max=True))
@settings(max_examples=100, deadline=None)
def test_inverse_cdf_finds_where_the_sum_passes_the_draw(weights, draw):
    weights = np.asarray(weights, np.float32) + np.float32(1e-3)
    index = _inverse_cdf(weights, draw)
    cumulated = np.cumsum(weights, dtype=np.float64) / weights.sum(dtype=np.float64)
    assert cumulated[index] > draw - 1e-9
    assert index == 0 or cumulated[index - 1] <= draw + 1e-9


def test_draws_follow_the_distribution(tiny_model):
    logits = np.full(tiny_model.vocabulary.n_tokens, -20, np.float32)
    logits[[3, 9, 27]] = np.log(np.array([0.2, 0.3, 0.5], np.float32))
    sampler = Sampler(
        SamplingConfig(temperature=1, top_k=0, top_p=1, min_p=0), tiny_model.handle, len(logits)
    )
    drawn = [sampler.sample(logits, (i + 0.5) / 1000) for i in range(1000)]
    assert [drawn.count(t) for t in (3, 9, 27)] == pytest.approx([200, 300, 500], abs=2)
    sampler.close()


@pytest.fixture
def make_sampler(tiny_model):
    made = []

    def make(prompt=(), **config):
        made.append(
            Sampler(SamplingConfig(**config), tiny_model.handle, tiny_model.vocabulary.n_tokens, 512, prompt)
        )
        return made[-1]

    yield make
    for sampler in made:
        sampler.close()
        sampler.close()


@pytest.fixture
def logits(tiny_model):
    return np.random.default_rng(0).standard_normal(tiny_model.vocabulary.n_tokens).astype(np.float32)


def test_greedy_takes_the_best_and_leaves_the_logits_alone(make_sampler, logits):
    before = logits.copy()
    assert make_sampler(temperature=0).sample(logits, 0.9) == logits.argmax()
    assert np.array_equal(logits, before)


def test_logit_bias_forbids_and_favours(make_sampler, logits):
    best = int(logits.argmax())
    assert make_sampler(temperature=0, logit_bias={best: -np.inf}).sample(logits, 0) != best
    assert make_sampler(temperature=0, logit_bias={5: 100.0}).sample(logits, 0) == 5


def test_penalties_see_the_prompt_and_what_was_accepted(make_sampler, logits):
    logits += 5
    best, second = np.argsort(-logits)[:2].tolist()
    sampler = make_sampler(prompt=[best], temperature=0, repeat_penalty=100.0)
    assert sampler.sample(logits, 0) == second
    sampler.accept(second)
    assert sampler.sample(logits, 0) not in (best, second)


def test_dry_breaks_a_repetition(make_sampler, logits):
    a, b = 300, 301
    logits[b] = logits.max() + 3
    plain = make_sampler(prompt=[a, b, a, b, a, b, a], temperature=0)
    dry = make_sampler(prompt=[a, b, a, b, a, b, a], temperature=0, dry_multiplier=5.0)
    assert plain.sample(logits, 0) == b
    assert dry.sample(logits, 0) != b


@pytest.mark.parametrize(
    "config",
    [
        {"mirostat": 1},
        {"mirostat": 2},
        {"typical_p": 0.5},
        {"top_n_sigma": 1.0},
        {"dynatemp_range": 0.5, "temperature": 1.0},
        {"xtc_probability": 1.0, "xtc_threshold": 0.01},
    ],
)
def test_llama_cpps_other_samplers_run_and_repeat(make_sampler, logits, config):
    logits *= 3
    first, second = (make_sampler(seed=7, **config) for _ in range(2))
    texts = []
    for sampler in (first, second):
        tokens = []
        for i in range(20):
            tokens.append(sampler.sample(logits, (i * 0.37) % 1))
            sampler.accept(tokens[-1])
        texts.append(tokens)
    assert texts[0] == texts[1]
    if config.get("xtc_probability"):
        assert logits.argmax() not in texts[0]
    else:
        assert len(set(texts[0])) > 1


def test_a_grammar_is_followed(make_sampler, tiny_model, logits):
    vocabulary = tiny_model.vocabulary
    sampler = make_sampler(temperature=0, grammar='root ::= ("yes" | "no") "!"')
    text = b""
    for _ in range(8):
        token = sampler.sample(logits, 0)
        sampler.accept(token)
        if vocabulary.is_end(token):
            break
        text += vocabulary.piece(token)
    assert text in (b"yes!", b"no!")
    assert vocabulary.is_end(token)


@pytest.mark.parametrize("grammar", ["", "root ::= undefined", 'rooot ::= "x"', "root ::= \0"])
def test_bad_grammars_are_refused(make_sampler, grammar):
    with pytest.raises(GrammarError):
        make_sampler(grammar=grammar)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_from_which_nothing_can_be_drawn(make_sampler, logits, value):
    logits[17] = value
    with pytest.raises(LogitsError):
        make_sampler().sample(logits, 0.5)
    with pytest.raises(LogitsError):
        make_sampler(temperature=0).sample(np.full_like(logits, -np.inf), 0.5)


def test_bias_of_a_token_that_is_none(make_sampler, tiny_model):
    with pytest.raises(TokenError):
        make_sampler(logit_bias={tiny_model.vocabulary.n_tokens: 1.0})


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("extra", [{}, {"typical_p": 0.5}, {"mirostat": 2}, {"top_n_sigma": 1.0}])
def test_a_bias_that_forbids_everything(tiny_model, temperature, extra):
    n = tiny_model.vocabulary.n_tokens
    bias = dict.fromkeys(range(n), -np.inf)
    config = SamplingConfig(temperature=temperature, logit_bias=bias, **extra)
    sampler = Sampler(config, tiny_model.handle, n)
    with pytest.raises(RequestError, match="logit_bias"):
        sampler.sample(np.zeros(n, np.float32), 0.5)


@pytest.mark.parametrize("values", [{"repeat_penalty": 1.2}, {"dry_multiplier": 1.0}])
def test_a_huge_window_takes_no_more_memory_than_the_context(tiny_model, values):
    window = {"penalty_last_n": 2**31 - 1, "dry_penalty_last_n": 2**31 - 1}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    Sampler(SamplingConfig(**values, **window), tiny_model.handle, tiny_model.vocabulary.n_tokens).close()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_what_a_grammar_forbids_cannot_be_accepted(tiny_model):
    vocabulary = tiny_model.vocabulary
    sampler = Sampler(SamplingConfig(grammar='root ::= "ab"'), tiny_model.handle, vocabulary.n_tokens)
    a, b, z = vocabulary.encode("abz", add_special=False)
    sampler.accept(a)
    for token in (z, vocabulary.eos):
        with pytest.raises(GrammarError):
            sampler.accept(token)
    sampler.accept(b)
    for token in (-1, vocabulary.n_tokens, 10**30, "x", None, 1.5):
        with pytest.raises(TokenError):
            sampler.accept(token)


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= " + "(" * 200_000 + '"a"' + ")" * 200_000,
        "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(100_000)) + '\nr100000 ::= "a"',
        'root ::= "a"{5,2}',
        'root ::= "\ud800"',
    ],
    ids=["deep", "long", "backwards", "surrogate"],
)
def test_grammars_on_which_llama_cpp_crashes_or_hangs(tiny_model, grammar):
    with pytest.raises(GrammarError):
        Sampler(SamplingConfig(grammar=grammar), tiny_model.handle, tiny_model.vocabulary.n_tokens)


def test_parentheses_in_texts_are_no_groups(tiny_model):
    grammar = "root ::= " + " | ".join(['"(" [(] "\\"("'] * 300)
    Sampler(SamplingConfig(grammar=grammar), tiny_model.handle, tiny_model.vocabulary.n_tokens).close()


def test_logits_of_another_vocabulary(tiny_model):
    sampler = Sampler(SamplingConfig(), tiny_model.handle, tiny_model.vocabulary.n_tokens)
    for shape in ((5,), (2, tiny_model.vocabulary.n_tokens)):
        with pytest.raises(RequestError):
            sampler.sample(np.zeros(shape, np.float32), 0.5)


def test_a_sampler_outlives_its_closed_model(tiny_model_path):
    model = Model.load(tiny_model_path)
    n = model.vocabulary.n_tokens
    sampler = Sampler(SamplingConfig(grammar="root ::= .+"), model.handle, n)
    model.close()
    assert sampler.sample(np.arange(n, dtype=np.float32), 0.5) >= 0
    sampler.close()
    with pytest.raises(ClosedError):
        sampler.sample(np.arange(n, dtype=np.float32), 0.5)
