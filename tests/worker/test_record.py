from __future__ import annotations

from llamaherd import Completion, Finished, GenerationRequest, SamplingConfig, Timings, Token, Usage
from llamaherd.worker.record import Record


def finished(*completions: Completion, cached: int = 0) -> Finished:
    produced = sum(len(c.tokens) for c in completions)
    return Finished(completions, Usage(4, produced, cached), Timings(0.1, 0.1, 0.1))


def test_a_seed_is_chosen_once() -> None:
    record = Record(GenerationRequest("x"))
    assert record.request.sampling.seed is not None
    resumed = record.resume()
    assert isinstance(resumed, GenerationRequest)
    assert resumed.sampling.seed == record.request.sampling.seed


def test_a_given_seed_stays() -> None:
    assert Record(GenerationRequest("x", sampling=SamplingConfig(seed=5))).request.sampling.seed == 5


def test_what_is_open_goes_on_and_what_has_ended_does_not() -> None:
    record = Record(GenerationRequest("x", n=3, request_id="r"))
    record.token(Token(0, 10, "a", -1.0))
    record.token(Token(1, 20, "b", -2.0, finish_reason="stop", stop="!"))
    resumed = record.resume()
    assert isinstance(resumed, GenerationRequest)
    assert list(resumed.indices) == [0, 2]
    assert resumed.resume == {0: (10,)}
    # the next worker knows of the open ones only; its log-probabilities are those of its own tokens
    record.token(Token(0, 11, "c", -3.0, finish_reason="length"))
    record.token(Token(2, 30, "d", -4.0, finish_reason="stop"))
    end = record.finished(
        finished(Completion(0, "ac", (10, 11), (-3.0,), "length"), Completion(2, "d", (30,), (-4.0,), "stop"))
    )
    assert [(c.index, c.text, c.tokens, c.logprobs) for c in end.completions] == [
        (0, "ac", (10, 11), (-1.0, -3.0)),
        (1, "b", (20,), (-2.0,)),
        (2, "d", (30,), (-4.0,)),
    ]
    assert end.completions[1].stop == "!"
    assert end.usage == Usage(4, 4)


def test_if_only_the_last_event_was_lost_it_is_made_up() -> None:
    record = Record(GenerationRequest("x"))
    record.token(Token(0, 1, "a", -1.0, finish_reason="stop"))
    end = record.resume()
    assert isinstance(end, Finished)
    assert end.completions[0].finish_reason == "stop"


def test_beams_start_again() -> None:
    record = Record(GenerationRequest("x", n=2, beams=2))
    resumed = record.resume()
    assert isinstance(resumed, GenerationRequest)
    assert resumed.indices is None
    assert not resumed.resume


def test_a_deadline_is_that_of_the_whole() -> None:
    record = Record(GenerationRequest("x", deadline=5.0))
    record.submitted -= 4.0
    resumed = record.resume()
    assert isinstance(resumed, GenerationRequest)
    assert resumed.deadline is not None
    assert 0.5 < resumed.deadline <= 1.0


def test_progress_clears_suspicion() -> None:
    record = Record(GenerationRequest("x"))
    record.strikes = record.setbacks = 1
    record.token(Token(0, 1, "a", -1.0))
    assert (record.strikes, record.setbacks) == (0, 0)
