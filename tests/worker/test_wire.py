from __future__ import annotations

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaherd import (
    Completion,
    Finished,
    GenerationRequest,
    Logprob,
    PromptPart,
    SamplingConfig,
    Timings,
    Token,
    Usage,
    errors,
)
from llamaherd.errors import LlamaherdError, PromptTooLongError, QueueFullError, WorkerStartError
from llamaherd.worker import wire


def through(request: GenerationRequest) -> GenerationRequest:
    message = wire.decode_down(wire.encode(wire.Submit(7, wire.pack_request(request))))
    assert isinstance(message, wire.Submit)
    return wire.unpack_request(message.request)


def test_a_request_survives_the_wire() -> None:
    request = GenerationRequest(
        [PromptPart("<|im_start|>", True), PromptPart("hé")],
        max_tokens=9,
        n=3,
        sampling=SamplingConfig(
            temperature=0.3, logit_bias={5: -math.inf, 6: 1.5}, seed=2**32 - 1, grammar="x"
        ),
        stop=["a", "b"],
        stop_tokens=[1],
        logprobs=2,
        deadline=1.5,
        client="me",
        indices=[0, 2],
        resume={2: [4, 5]},
        request_id="r",
    )
    back = through(request)
    assert {n: getattr(back, n) for n in wire.WireRequest.__struct_fields__ if n != "prompt"} == {
        n: getattr(request, n) for n in wire.WireRequest.__struct_fields__ if n != "prompt"
    }
    assert list(back.prompt) == list(request.prompt)


@given(st.one_of(st.text(), st.lists(st.integers(0, 2**31 - 1))))
def test_any_prompt_survives_the_wire(prompt: str | list[int]) -> None:
    back = wire.unpack_prompt(wire.pack_prompt(prompt))
    assert back == prompt or (not prompt and not back)


def test_lone_surrogates_become_replacement_characters() -> None:
    assert through(GenerationRequest("a\ud800b", stop=["\udfff"])).prompt == "a\ufffdb"


def test_events_survive_the_wire() -> None:
    token = Token(1, 2, "é", -0.5, (Logprob(2, b"\xc3", -0.5),), "stop", "\n", b"\xc3")
    finished = Finished(
        (Completion(0, "x", (1, 2), (-0.1, -0.2), "length"),), Usage(1, 2, 3), Timings(1, 2, 3)
    )
    failed = (3, wire.pack_error(QueueFullError(4)), Usage(0, 0))
    events = wire.Events([(1, token)], [(2, finished)], [failed])
    back = wire.decode_up(wire.encode(events))
    assert back == events


def test_errors_keep_type_message_and_attributes() -> None:
    for error in (PromptTooLongError(9, 8), QueueFullError(3, 2.5), errors.TokenError(5, 4, 1)):
        back = wire.unpack_error(wire.pack_error(error))
        assert type(back) is type(error)
        assert str(back) == str(error)
        assert vars(back) == vars(error)


def test_every_error_of_the_tree_is_known() -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        bare = kind.__new__(kind)
        Exception.__init__(bare, "what")
        assert type(wire.unpack_error(wire.pack_error(bare))) is kind


def test_a_foreign_subclass_comes_back_as_its_known_base() -> None:
    class OwnError(LlamaherdError):
        pass

    assert type(wire.unpack_error(wire.pack_error(OwnError("x")))) is LlamaherdError


def test_another_version_is_refused() -> None:
    file = io.BytesIO()
    wire.write_config(file, wire.WorkerConfig(model="m"), up="u", down="d")
    file.seek(0)
    assert wire.read_config(file) == (wire.WorkerConfig(model="m"), "u", "d")
    data = file.getvalue().replace(bytes([0xA7]) + b"version\x01", bytes([0xA7]) + b"version\x63")
    with pytest.raises(WorkerStartError, match="99"):
        wire.read_config(io.BytesIO(data))
