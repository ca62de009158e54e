"""StreamingLLM: text far past n_ctx in a window, with perplexity like that of a text that fits."""

from __future__ import annotations

import pytest
import torch

from llamaherd.errors import InvalidParameterError, PositionError, UnsupportedError
from llamaherd.hf import SinkCache


@pytest.fixture
def model(fresh):
    return fresh(n_ctx=256)


def test_generates_four_contexts_and_stays_in_the_window(model):
    cache = SinkCache(model, window=128)
    out = model.generate(
        torch.tensor([[20, 30, 40, 50]]), cache=cache, max_new_tokens=1024, eos_token_id=None
    )
    assert out.shape == (1, 1028)
    assert cache.get_seq_length() == 1027
    assert cache.length(0) <= 128


def test_within_the_window_it_is_an_ordinary_cache(model):
    ids = torch.randint(10, 250, (2, 30))
    plain = model.generate(ids, max_new_tokens=20, eos_token_id=None)
    sink = model.generate(ids, max_new_tokens=20, eos_token_id=None, cache=SinkCache(model, window=64))
    assert torch.equal(plain, sink)


def test_after_a_shift_it_equals_recomputing_the_first_layer_of_what_is_kept(fresh):
    """With one layer, keys depend on their tokens and positions alone: K-shift is then exact."""
    model = fresh(n_ctx=256, options={"layers": 1})
    ids = torch.randint(10, 250, (1, 64))
    cache = SinkCache(model, window=48, sinks=4, shift=16)
    logits = model(ids, cache=cache).logits[:, -1]
    kept = torch.cat([ids[:, :4], ids[:, 64 - (cache.length(0) - 4) :]], 1)
    assert 32 <= cache.length(0) <= 48
    assert (logits - model(kept).logits[:, -1]).abs().max() < 1e-3


def test_rows_of_different_lengths_shift_by_themselves(model):
    mask = torch.ones(2, 100)
    mask[0, :60] = 0
    ids = torch.randint(10, 250, (2, 100))
    cache = SinkCache(model, window=64)
    model(ids, attention_mask=mask, cache=cache)
    assert cache.length(0) == 40
    assert cache.length(1) <= 64
    alone = model.generate(ids[:1, 60:], max_new_tokens=10, eos_token_id=None)
    both = model.generate(
        ids, attention_mask=mask, cache=SinkCache(model, window=64), max_new_tokens=10, eos_token_id=None
    )
    assert torch.equal(alone[0, -10:], both[0, -10:])


def test_bad_windows_and_models_are_refused(model, fresh):
    with pytest.raises(InvalidParameterError, match="n_ctx = 256"):
        SinkCache(model, window=1000)
    with pytest.raises(InvalidParameterError, match="sinks"):
        SinkCache(model, window=8, sinks=8)
    with pytest.raises(UnsupportedError, match="shifted"):
        SinkCache(fresh("mamba"))


def test_what_left_the_window_cannot_be_cropped_back(model):
    cache = SinkCache(model, window=32)
    model(torch.randint(10, 250, (1, 100)), cache=cache)
    cache.crop(-3)
    with pytest.raises(PositionError, match="window"):
        cache.crop(-60)
