"""Distinctness and ranking, over completions made by hand."""

import pytest

from llamaherd.config import SamplingConfig
from llamaherd.errors import ConfigError, InvalidParameterError
from llamaherd.suggestions import suggest
from llamaherd.types import Completion, Finished, Timings, Usage


class Source:
    """Completion i is the i-th of these texts; what was asked for is remembered."""

    def __init__(self, *texts, reason="stop"):
        self.texts, self.reason, self.requests = texts, reason, []

    def __call__(self, request):
        self.requests.append(request)
        indices = range(request.n) if request.indices is None else request.indices
        made = [self.make(i, self.texts[i % len(self.texts)]) for i in indices]
        return Finished(tuple(made), Usage(1, 1), Timings(0, 0, 0))

    def make(self, i, text):
        return Completion(i, text, (1, 2), (-float(len(text)), -1.0), self.reason)


def texts(source, n, **kwargs):
    return [s.text for s in suggest(source, "p", n, 8, **kwargs)]


def test_best_first():
    assert texts(Source("ccc", "a", "bb"), 3) == ["a", "bb", "ccc"]


def test_what_comes_out_alike_is_replaced_by_further_samples():
    source = Source("a", "a", " a ", "bb", "ccc", "dd", "e")
    assert texts(source, 3) == ["a", "bb", "ccc"]
    assert [list(r.indices) for r in source.requests] == [[0, 1, 2], [3, 4]]
    assert len({r.sampling.seed for r in source.requests}) == 1


def test_empty_ones_do_not_count_and_the_trying_ends():
    source = Source("", " \n")
    assert texts(source, 4) == []
    assert sum(len(r.indices) for r in source.requests) == 16


def test_a_filter_of_ones_own():
    assert texts(Source("sorry", "simp", "ring", "sorry"), 2, keep=lambda t: t != "sorry") == ["ring", "simp"]


def test_no_further_waves_after_the_deadline():
    source = Source("a", reason="deadline")
    assert texts(source, 4) == ["a"]
    assert len(source.requests) == 1


def test_beams():
    source = Source("a", "b")
    texts(source, 2, beam=True)
    assert source.requests[0].beams == 2


def test_refusals():
    with pytest.raises(InvalidParameterError):
        texts(Source("a"), 0)
    with pytest.raises(ConfigError, match="temperature"):
        texts(Source("a"), 2, sampling=SamplingConfig(temperature=0))
