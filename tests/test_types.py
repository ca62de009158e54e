"""Requests and settings refuse what they cannot mean, before anything runs."""

import numpy as np
import pytest

from llamaherd.config import LoraConfig, SamplingConfig, SchedulerConfig
from llamaherd.errors import ConfigError, InvalidParameterError
from llamaherd.types import Finished, GenerationRequest, PromptPart, Timings, Usage

HUGE = 10**6000


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": -HUGE},
        {"max_tokens": float("nan")},
        {"n": "2"},
        {"sampling": None},
        {"sampling": {}},
        {"stop": None},
        {"stop": 5},
        {"stop": [b"x"]},
        {"stop_tokens": None},
        {"stop_tokens": "12"},
        {"stop_tokens": [1.5]},
        {"stop_tokens": [True]},
        {"ignore_eos": 1},
        {"client": []},  # it would be a key of the scheduler's
        {"client": None},
        {"request_id": 5},
        {"indices": []},  # no candidate would ever end
        {"n": 3, "indices": [0, 0]},
        {"n": 3, "indices": ["x"]},
        {"n": 3, "indices": [0.5]},
        {"indices": 5},
        {"resume": None},
        {"resume": [0]},
        {"resume": {0: None}},
        {"resume": {0: ["x"]}},
        {"resume": {0: [1.5]}},
        {"resume": {"0": [1]}},
    ],
)
def test_requests_of_the_wrong_kind_are_refused(values):
    with pytest.raises(InvalidParameterError):
        GenerationRequest("x", **values)


@pytest.mark.parametrize(
    "values",
    [
        {"top_n_sigma": 10**400},
        {"mirostat": True},
        {"mirostat": []},
        {"grammar": b"root"},
        {"grammar_root": 5},
        {"logit_bias": [1]},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {0: "x"}},
        {"logit_bias": {0: 1e308}},  # infinite as a float of llama.cpp's
        {"logit_bias": {0: 10**400}},
        {"dry_sequence_breakers": "abc"},
        {"dry_sequence_breakers": (5,)},
        {"dry_sequence_breakers": ("",)},
        {"dry_sequence_breakers": ("\0",)},
        {"dry_sequence_breakers": ("\ud800",)},
    ],
)
def test_sampling_of_the_wrong_kind_is_refused(values):
    with pytest.raises(InvalidParameterError):
        SamplingConfig(**values)


def test_numbers_without_an_upper_limit_may_be_huge():
    assert GenerationRequest("x", max_tokens=10**400).max_tokens == 10**400


def test_other_settings_of_the_wrong_kind_are_refused():
    for make in (
        lambda: PromptPart(None),
        lambda: PromptPart("a", 1),
        lambda: LoraConfig(5),
        lambda: SchedulerConfig(prefix_cache=1),
    ):
        with pytest.raises(ConfigError):
            make()


def test_a_request_keeps_what_it_was_given():
    stop, tokens, resume = ["end"], np.array([3, 4]), {0: [1, 2]}
    request = GenerationRequest("x", stop=stop, stop_tokens=tokens, resume=resume)
    stop.append("x")
    tokens[0] = 9
    resume[0].append(9)
    assert request.stop == ("end",)
    assert request.stop_tokens == (3, 4)
    assert request.resume == {0: (1, 2)}


def test_a_result_without_completions_has_an_empty_text():
    assert Finished((), Usage(1, 0), Timings(0, 0, 0)).text == ""


@pytest.mark.parametrize(
    "sampling",
    [
        {"grammar": 'root ::= "x"'},
        {"json_schema": "{}"},
        {"logit_bias": {3: -1.0}},
        {"repeat_penalty": 1.1},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"dry_multiplier": 0.8},
    ],
)
def test_beams_refuse_what_they_would_not_follow(sampling):
    GenerationRequest("x", sampling=SamplingConfig(**sampling))
    with pytest.raises(InvalidParameterError, match="own distribution"):
        GenerationRequest("x", beams=2, sampling=SamplingConfig(**sampling))


def test_a_schema_is_text():
    with pytest.raises(InvalidParameterError, match=r"json\.dumps"):
        SamplingConfig(json_schema={"type": "object"})
