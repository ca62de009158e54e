"""What the scheduler offers to who stands around it: room, idle sequences, and events that can be carried on."""

from __future__ import annotations

import numpy as np

from llamaherd import GenerationRequest, SamplingConfig, Token
from llamaherd.scheduler.loop import Scheduler
from llamaherd.testing import FakeEngine, text_logits

GREEDY = SamplingConfig(temperature=0)


def events(scheduler: Scheduler, request: GenerationRequest) -> list[Token]:
    handle = scheduler.submit(request)
    scheduler.run_until_idle()
    return [e for e in handle if isinstance(e, Token)]


def test_a_token_says_which_stop_text_ended_it_and_its_own_bytes() -> None:
    scheduler = Scheduler(FakeEngine(logits=text_logits("one END two", "go: ")))
    tokens = events(scheduler, GenerationRequest("go: ", sampling=GREEDY, stop=["END"], max_tokens=20))
    assert [t.stop for t in tokens] == [None] * (len(tokens) - 1) + ["END"]
    assert b"".join(t.piece for t in tokens) == b"one END"
    ended = events(scheduler, GenerationRequest("go: ", sampling=GREEDY, max_tokens=20))
    assert ended[-1].piece == b""


def test_an_adopted_sequence_serves_prompts_that_begin_like_it() -> None:
    engine = FakeEngine()
    scheduler = Scheduler(engine)
    first = events(scheduler, GenerationRequest("abcdef", sampling=GREEDY, max_tokens=4))
    ((sequence, tokens),) = scheduler.idle()
    assert bytes(tokens[1:7].tolist()) == b"abcdef"
    # as a store does it: out of one scheduler, into the next
    other_engine = FakeEngine()
    other = Scheduler(other_engine)
    copy = other_engine.memory.allocate()
    for token in engine.memory.tokens[sequence]:
        other_engine.memory.append(copy, token)
    other.adopt(copy, np.asarray(tokens, np.int32))
    again = events(other, GenerationRequest("abcdef", sampling=GREEDY, max_tokens=4))
    assert [t.token for t in again] == [t.token for t in first]
    assert other.stats().reused_tokens >= 6


def test_room_is_made_by_dropping_idle_sequences() -> None:
    engine = FakeEngine(n_sequences=4, n_ctx=64)
    scheduler = Scheduler(engine)
    for text in ("aaaa", "bbbb", "cccc"):
        events(scheduler, GenerationRequest(text, sampling=GREEDY, max_tokens=3))
    assert len(scheduler.idle()) == 3
    assert scheduler.make_room(sequences=3)
    assert engine.memory.free_sequences >= 3
    assert not scheduler.make_room(cells=65)
