"""Perplexity and comparison against transformers' recipe on the same windows."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from llamaherd.cli import main
from llamaherd.errors import InvalidParameterError, PromptTooLongError, RequestError
from llamaherd.perplexity import compare, perplexity, windows


def recipe(model, tokens, window, stride):
    """The loop of transformers' page on the perplexity of fixed-length models."""
    ids = torch.tensor([tokens])
    total, count, previous = 0.0, 0, 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + window, len(tokens))
        length = end - previous
        part = ids[:, begin:end]
        labels = part.clone()
        labels[:, :-length] = -100
        with torch.no_grad():
            loss = model(part, labels=labels).loss
        valid = int((labels[:, 1:] != -100).sum())
        if valid:
            total += float(loss) * valid
            count += valid
        previous = end
        if end == len(tokens):
            break
    return math.exp(total / count), count


@pytest.fixture
def tokens():
    return torch.randint(10, 250, (300,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.mark.parametrize(("window", "stride"), [(64, 32), (64, 64), (100, 7), (512, 256)])
def test_equals_the_recipe_with_both_models(window, stride, pair, tokens):
    found = perplexity(pair.ours.runtime.context, tokens, window=window, stride=stride)
    for model in pair.models:
        value, count = recipe(model, tokens, window, stride)
        assert found.n_tokens == count
        assert abs(found.value / value - 1) < 1e-4


def test_windows_count_each_token_once():
    for n, window, stride in ((1, 4, 2), (2, 4, 4), (10, 4, 2), (11, 5, 5), (300, 100, 7)):
        counted = [t for _, end, first in windows(n, window, stride) for t in range(first, end)]
        assert len(set(counted)) == len(counted)
        lost = set(range(1, n)) - set(counted)
        assert not lost or stride == window  # then each window's first token has nothing before it


def test_compare_with_itself_and_with_another(pair, pairs, tokens, fresh):
    # both contexts are new: their tokens lie in the same cells, so that every sum has the same order
    same = compare(fresh().runtime.context, fresh().runtime.context, tokens, window=64)
    assert same.divergence.max() == 0
    assert same.top_agreement == 1
    assert same.ratio == pytest.approx(1, abs=1e-6)
    rough = fresh(options={"type": "q8_0"})
    other = compare(pair.ours.runtime.context, rough.runtime.context, tokens, window=64, stride=64)
    expected = []
    for begin in range(0, 300, 64):
        ids = torch.tensor([tokens[begin : begin + 64]])
        p = pair.theirs(ids).logits[0, :-1].detach().double().log_softmax(-1)
        q = rough(ids).logits[0, :-1].double().log_softmax(-1)
        expected.append((p.exp() * (p - q)).sum(-1).numpy())
    assert np.allclose(other.divergence, np.concatenate(expected), rtol=1e-2, atol=1e-5)
    assert 0 < other.divergence.mean() < 1
    assert 0.5 < other.top_agreement < 1


def test_bad_requests_are_refused_and_leave_nothing(pair, pairs, tokens):
    context = pair.ours.runtime.context
    free = context.memory.free_cells
    with pytest.raises(InvalidParameterError, match="stride"):
        perplexity(context, tokens, window=8, stride=9)
    with pytest.raises(RequestError, match="two"):
        perplexity(context, tokens[:1])
    with pytest.raises(PromptTooLongError):
        perplexity(context, tokens * 5, window=1200)
    with pytest.raises(RequestError, match="vocabulary"):
        compare(context, pairs("mistral").ours.runtime.context, tokens)
    assert context.memory.free_cells == free


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog and then the herd of llamas rests. " * 8)
    return path


def test_command_perplexity(tiny, text, tokenizer, pair, capsys):
    options = ["--window", "64", "--threads", "1", "--kv-type", "f32"]
    assert main(["perplexity", str(tiny()), str(text), *options]) == 0
    out = capsys.readouterr().out
    value, count = recipe(pair.theirs, tokenizer(text.read_text()).input_ids, 64, 32)
    assert f"{count} tokens" in out
    assert abs(float(out.split()[1]) / value - 1) < 1e-3


def test_command_compare(tiny, text, tmp_path, capsys):
    svg = tmp_path / "out.svg"
    options = ["--window", "64", "--threads", "1"]
    files = [str(tiny()), str(tiny(type="q8_0")), str(text)]
    assert main(["compare", *files, *options, "--svg", str(svg)]) == 0
    assert "same top token" in capsys.readouterr().out
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert main(["compare", str(tiny()), str(tiny("mistral")), str(text), *options]) == 1
    assert "vocabulary" in capsys.readouterr().err
    assert main(["perplexity", "none.gguf", str(text)]) == 1
    assert "none.gguf" in capsys.readouterr().err
