"""The scheduler over an engine without a model, stepped by hand."""

import itertools
import random
import time

import numpy as np
import pytest

from llamaherd.config import SamplingConfig, SchedulerConfig
from llamaherd.errors import (
    ClosedError,
    DeadlineError,
    DecodeAbortedError,
    DecodeError,
    EmptyPromptError,
    GrammarError,
    InvalidParameterError,
    LogitsError,
    NativeError,
    OutOfCellsError,
    OutOfSequencesError,
    PromptTooLongError,
    QueueFullError,
    TokenError,
)
from llamaherd.scheduler.loop import Scheduler
from llamaherd.testing import FakeEngine, pseudo_random_logits, text_logits
from llamaherd.types import Failed, Finished, GenerationRequest, Token

GREEDY = SamplingConfig(temperature=0)
SEEDED = SamplingConfig(temperature=1, seed=5)


def make(engine=None, **config):
    return Scheduler(engine or FakeEngine(), SchedulerConfig(**config))


def run(scheduler, *requests):
    handles = [scheduler.submit(r) for r in requests]
    scheduler.run_until_idle(10_000)
    return [h.result(0) for h in handles]


def alone(request, **engine):
    """What a request gives with an engine to itself."""
    return run(make(FakeEngine(**engine)), request)[0]


def greedy_tokens(prompt, n):
    """The greedy continuation, computed without a scheduler."""
    tokens = FakeEngine().vocabulary.encode_prompt(prompt)
    start = len(tokens)
    for _ in range(n):
        tokens.append(int(pseudo_random_logits(tokens).argmax()))
    return tuple(tokens[start:])


def test_greedy_text_is_the_models():
    final = alone(GenerationRequest("hello", max_tokens=20, sampling=GREEDY))
    assert final.completions[0].tokens == greedy_tokens("hello", 20)
    assert final.completions[0].finish_reason == "length"
    assert final.usage.prompt_tokens == 6
    assert final.usage.completion_tokens == 20


def test_logprobs_are_of_the_unmodified_distribution():
    request = GenerationRequest("abc", max_tokens=1, sampling=GREEDY, logprobs=3)
    scheduler = make()
    handle = scheduler.submit(request)
    scheduler.run_until_idle()
    token = next(e for e in handle if isinstance(e, Token))
    logits = pseudo_random_logits(FakeEngine().vocabulary.encode_prompt("abc")).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum())
    assert token.logprob == pytest.approx(expected.max(), abs=1e-5)
    assert [p.token for p in token.top_logprobs] == np.argsort(-expected)[:3].tolist()
    assert [p.logprob for p in token.top_logprobs] == pytest.approx(np.sort(expected)[::-1][:3], abs=1e-5)


def test_events_are_tokens_then_one_terminal_event():
    scheduler = make()
    handle = scheduler.submit(GenerationRequest("x", max_tokens=5, n=2, sampling=SEEDED))
    scheduler.run_until_idle()
    events = list(handle)
    assert [type(e) for e in events[-1:]] == [Finished]
    assert all(isinstance(e, Token) for e in events[:-1])
    for i in (0, 1):
        text = "".join(e.text for e in events[:-1] if e.index == i)
        assert text == events[-1].completions[i].text
    assert handle.next_event(0) is None


def test_the_end_token_stops_and_is_not_in_the_text():
    engine = FakeEngine(logits=text_logits("bye", "hi"))
    final = run(make(engine), GenerationRequest("hi", max_tokens=50, sampling=GREEDY))[0]
    assert final.text == "bye"
    assert final.completions[0].tokens == (*b"bye", 257)
    assert final.completions[0].finish_reason == "stop"


def test_ignore_eos_goes_on():
    engine = FakeEngine(logits=text_logits("bye", "hi"))
    request = GenerationRequest("hi", max_tokens=9, sampling=GREEDY, ignore_eos=True)
    completion = run(make(engine), request)[0].completions[0]
    assert len(completion.tokens) == 9
    assert 257 not in completion.tokens


def test_stop_texts_and_stop_tokens():
    engine = FakeEngine(logits=text_logits("one\n\ntwo", "hi"))
    final = run(make(engine), GenerationRequest("hi", sampling=GREEDY, stop=["\n\n"]))[0]
    assert (final.text, final.completions[0].stop) == ("one", "\n\n")
    final = run(make(engine), GenerationRequest("hi", sampling=GREEDY, stop_tokens=[ord("e")]))[0]
    assert (final.text, final.completions[0].finish_reason) == ("on", "stop")


def test_n_candidates_share_one_prefill():
    engine = FakeEngine(n_sequences=16, n_ctx=512)
    final = run(make(engine), GenerationRequest("p" * 40, n=8, max_tokens=6, sampling=SEEDED))[0]
    assert len({c.tokens for c in final.completions}) > 1
    prefilled = sum(len(b) for b in engine.batches if len(b) > 8)
    assert prefilled == 41
    assert max(len(b) for b in engine.batches if len(b) <= 8) == 8


def test_more_candidates_than_slots_run_in_waves():
    request = GenerationRequest("prompt", n=30, max_tokens=4, sampling=SEEDED)
    few = run(make(FakeEngine(n_sequences=6), max_sequences=3), request)[0]
    many = run(make(FakeEngine(n_sequences=64, n_ctx=2048), max_sequences=32), request)[0]
    assert len(few.completions) == 30
    assert [c.tokens for c in few.completions] == [c.tokens for c in many.completions]


def test_a_seeded_request_gives_the_same_beside_others():
    request = GenerationRequest("seeded", n=3, max_tokens=12, sampling=SEEDED)
    expected = [c.tokens for c in alone(request).completions]
    noise = [GenerationRequest(f"noise {i}" * 5, max_tokens=7 + i) for i in range(5)]
    scheduler = make(FakeEngine(n_sequences=16, n_ctx=1024))
    assert [c.tokens for c in run(scheduler, *noise[:3], request, *noise[3:])[3].completions] == expected


def test_a_long_prompt_does_not_stall_those_who_decode():
    engine = FakeEngine(n_ctx=1024, n_batch=64)
    scheduler = make(engine, prefill_chunk=64)
    first = scheduler.submit(GenerationRequest("a", max_tokens=100, sampling=GREEDY))
    scheduler.step()
    scheduler.step()
    scheduler.submit(GenerationRequest("b" * 500, max_tokens=1, sampling=GREEDY))
    before = first.backlog
    for _ in range(8):
        scheduler.step()
    assert first.backlog == before + 8


def test_shapes_do_not_depend_on_load():
    def prompt_batches(*others):
        engine = FakeEngine(n_ctx=1024, n_batch=64, n_sequences=8)
        scheduler = make(engine, prefill_chunk=32, prefix_cache=False)
        run(scheduler, *others, GenerationRequest("q" * 100, max_tokens=1, sampling=GREEDY))
        only_prompt = [b for b in engine.batches if set(b.tokens.tolist()) <= {ord("q"), 256} and len(b) > 4]
        return [len(b) for b in only_prompt]

    assert prompt_batches() == [32, 32, 32, 5]
    assert prompt_batches(*[GenerationRequest("z" * 70, max_tokens=20) for _ in range(3)]) == [32, 32, 32, 5]


def test_a_known_prefix_is_not_computed_again():
    scheduler = make(FakeEngine(n_ctx=512))
    first = GenerationRequest("the same beginning, " + "a" * 20, max_tokens=4, sampling=GREEDY)
    second = GenerationRequest("the same beginning, " + "b" * 20, max_tokens=4, sampling=GREEDY)
    run(scheduler, first)
    usage = run(scheduler, second)[0].usage
    assert usage.cached_tokens == 21
    final = run(scheduler, first)[0]
    assert final.usage.cached_tokens == 41
    assert final.completions[0].tokens == greedy_tokens(first.prompt, 4)


def test_a_conversation_goes_on_where_it_was():
    engine = FakeEngine(n_ctx=512)
    scheduler = make(engine)
    first = run(scheduler, GenerationRequest("question", max_tokens=8, sampling=GREEDY))[0]
    turn = [256, *b"question", *first.completions[0].tokens, *b"again"]
    engine.batches.clear()
    final = run(scheduler, GenerationRequest(turn, max_tokens=1, sampling=GREEDY))[0]
    assert final.usage.cached_tokens == 9 + 7  # the last token was never decoded
    assert len(engine.batches[0]) == 6


def test_recurrent_models_reuse_whole_sequences_only():
    engine = FakeEngine(n_ctx=512, can_trim=False)
    scheduler = make(engine)
    run(scheduler, GenerationRequest("abcdef", max_tokens=3, sampling=GREEDY))
    final = run(scheduler, GenerationRequest("abcxyz", max_tokens=3, sampling=GREEDY))[0]
    assert final.usage.cached_tokens == 0
    assert final.completions[0].tokens == greedy_tokens("abcxyz", 3)


def test_resumed_candidates_go_on_as_if_nothing_had_happened():
    request = GenerationRequest("resume me", n=3, max_tokens=15, sampling=SEEDED, stop=["zz"])
    whole = alone(request)
    done = {i: whole.completions[i].tokens[:k] for i, k in ((0, 4), (2, 9))}
    again = GenerationRequest(
        "resume me", n=3, max_tokens=15, sampling=SEEDED, stop=["zz"], indices=[0, 2], resume=done
    )
    scheduler = make()
    handle = scheduler.submit(again)
    scheduler.run_until_idle()
    events = list(handle)
    final = events[-1]
    assert isinstance(final, Finished)
    assert [c.tokens for c in final.completions] == [whole.completions[i].tokens for i in (0, 2)]
    assert [c.text for c in final.completions] == [whole.completions[i].text for i in (0, 2)]
    new = [e.token for e in events if isinstance(e, Token) and e.index == 2]
    assert tuple(new) == whole.completions[2].tokens[9:]


@pytest.mark.parametrize("when", ["queued", "prefill", "decode"])
def test_cancelling_frees_the_slot_at_once(when):
    engine = FakeEngine(n_ctx=512, n_batch=16)
    scheduler = make(engine, prefill_chunk=16, prefix_cache=False)
    handle = scheduler.submit(GenerationRequest("c" * 100, n=4, max_tokens=100))
    if when != "queued":
        scheduler.step()
    if when == "decode":
        for _ in range(10):
            scheduler.step()
    handle.cancel()
    scheduler.step()
    events = list(handle)
    assert isinstance(events[-1], Finished)
    assert {c.finish_reason for c in events[-1].completions} == {"cancelled"}
    assert engine.memory.free_sequences == engine.memory.n_sequences
    assert engine.memory.used_cells == 0
    assert all(s.closed for s in engine.samplers)


def test_cancelling_stops_the_batch_in_flight_when_nobody_else_is_in_it():
    engine = FakeEngine()
    scheduler = make(engine)
    handle = scheduler.submit(GenerationRequest("abc"))
    engine._on_decode = lambda batch: handle.cancel()
    scheduler.step()
    assert not engine.batches  # the fake raises DecodeAbortedError where the real engine is aborted
    engine._on_decode = None
    scheduler.run_until_idle()
    assert handle.result(0).completions[0].finish_reason == "cancelled"


def test_others_are_untouched_by_cancelling():
    steady = [GenerationRequest(f"steady {i}", max_tokens=40, sampling=SEEDED) for i in range(4)]
    expected = [alone(r).completions[0].tokens for r in steady]
    engine = FakeEngine(n_sequences=12, n_ctx=2048)
    scheduler = make(engine, max_sequences=8)
    handles = [scheduler.submit(r) for r in steady]
    rng = random.Random(1)
    noise = []
    for i in itertools.count():
        if all(h.done for h in handles):
            break
        if len(noise) < 50:
            noise.append(
                scheduler.submit(GenerationRequest(f"noise {i}" * rng.randint(1, 9), n=rng.randint(1, 4)))
            )
        if rng.random() < 0.7:
            rng.choice(noise).cancel()
        scheduler.step()
    for handle in noise:
        handle.cancel()
    scheduler.run_until_idle()
    assert [h.result(0).completions[0].tokens for h in handles] == expected
    scheduler.drop_cache()
    assert engine.memory.free_sequences == 12
    assert engine.memory.used_cells == 0


def test_running_out_of_cells_makes_the_youngest_wait_and_loses_nothing():
    engine = FakeEngine(n_sequences=8, n_ctx=128)
    scheduler = make(engine, max_sequences=4)
    requests = [GenerationRequest(f"{i}" * 30, max_tokens=60, sampling=SEEDED) for i in range(4)]
    finals = run(scheduler, *requests)
    for request, final in zip(requests, finals, strict=True):
        assert final.completions[0].tokens == alone(request, n_ctx=1024).completions[0].tokens


def test_forks_that_together_outgrow_the_cache_end_all_the_same():
    engine = FakeEngine(n_sequences=16, n_ctx=128)
    request = GenerationRequest("f" * 20, n=8, max_tokens=70, sampling=SEEDED)
    final = run(make(engine, max_sequences=8), request)[0]
    roomy = alone(request, n_ctx=4096, n_sequences=16)
    assert [c.tokens for c in final.completions] == [c.tokens for c in roomy.completions]


def test_the_contexts_end_is_length_not_stop():
    final = run(make(FakeEngine(n_ctx=64)), GenerationRequest("a" * 50, max_tokens=10_000, sampling=GREEDY))[
        0
    ]
    assert final.completions[0].finish_reason == "length"
    assert final.usage.prompt_tokens + final.usage.completion_tokens == 64


def nan_for(marker):
    def logits(tokens):
        row = pseudo_random_logits(tokens).copy()
        if marker in bytes(t for t in tokens if t < 256):
            row[7] = np.nan
        return row

    return logits


def test_nan_logits_fail_that_request_only():
    scheduler = make(FakeEngine(logits=nan_for(b"poison")))
    good = scheduler.submit(GenerationRequest("good", max_tokens=10, sampling=GREEDY))
    bad = scheduler.submit(GenerationRequest("poison", max_tokens=10, sampling=GREEDY))
    scheduler.run_until_idle()
    with pytest.raises(LogitsError, match="NaN"):
        bad.result(0)
    assert good.result(0).completions[0].tokens == greedy_tokens("good", 10)


def test_a_failing_batch_fails_only_whom_it_must():
    def on_decode(batch):
        if (batch.tokens == ord("!")).any() or any(
            ord("!") in engine.memory.tokens[s] for s in set(batch.sequences.tolist())
        ):
            raise DecodeError(-3, "cannot compute this")

    engine = FakeEngine(on_decode=on_decode)
    scheduler = make(engine)
    good = [scheduler.submit(GenerationRequest(f"good {i}", max_tokens=5, sampling=GREEDY)) for i in range(2)]
    bad = scheduler.submit(GenerationRequest("bad!", max_tokens=5, sampling=GREEDY))
    scheduler.run_until_idle()
    with pytest.raises(DecodeError):
        bad.result(0)
    assert [h.result(0).usage.completion_tokens for h in good] == [5, 5]


def test_a_bug_in_the_engine_ends_requests_with_an_error_and_not_the_process():
    def on_decode(batch):
        raise ZeroDivisionError

    scheduler = make(FakeEngine(on_decode=on_decode))
    handle = scheduler.submit(GenerationRequest("x"))
    with pytest.raises(ZeroDivisionError):
        scheduler.step()
    scheduler.fail_all(ZeroDivisionError())
    assert isinstance(list(handle)[-1], Failed)
    with pytest.raises(NativeError):
        handle.result(0)


def test_deadlines():
    scheduler = make()
    late = scheduler.submit(GenerationRequest("x", deadline=0))
    scheduler.run_until_idle()
    with pytest.raises(DeadlineError):
        late.result(0)
    partial = scheduler.submit(GenerationRequest("x", deadline=0.2, max_tokens=100_000))
    for _ in range(4):
        scheduler.step()
    time.sleep(0.25)
    scheduler.step()
    completion = partial.result(0).completions[0]
    assert completion.finish_reason == "deadline"
    assert 1 <= len(completion.tokens) <= 4


def test_a_slow_reader_is_waited_for():
    engine = FakeEngine(n_ctx=512)
    scheduler = make(engine, max_buffered_events=5)
    handle = scheduler.submit(GenerationRequest("x", max_tokens=40, sampling=GREEDY))
    for _ in range(60):
        scheduler.step()
    assert handle.backlog == 5
    tokens = []
    while not handle.done or handle.backlog:
        event = handle.poll()
        if isinstance(event, Token):
            tokens.append(event.token)
        scheduler.step()
    assert tuple(tokens) == greedy_tokens("x", 40)


def test_fair_order_between_clients():
    scheduler = make(FakeEngine(n_sequences=8, n_ctx=2048), max_sequences=4, prefix_cache=False)
    big = scheduler.submit(GenerationRequest("big", n=40, max_tokens=20, client="a", sampling=SEEDED))
    scheduler.step()
    small = scheduler.submit(GenerationRequest("small", max_tokens=5, client="b", sampling=SEEDED))
    steps = 0
    while not small.done:
        scheduler.step()
        steps += 1
    assert steps < 40
    assert not big.done


def test_refused_requests_say_why():
    scheduler = make(FakeEngine(n_ctx=64))
    with pytest.raises(PromptTooLongError) as long:
        scheduler.submit(GenerationRequest("x" * 100))
    assert (long.value.n_prompt, long.value.n_ctx) == (101, 64)
    with pytest.raises(EmptyPromptError):
        make(FakeEngine(add_bos=False)).submit(GenerationRequest(""))
    with pytest.raises(TokenError) as token:
        scheduler.submit(GenerationRequest([1, 2, 999]))
    assert (token.value.token, token.value.n_vocab, token.value.index) == (999, 258, 2)
    with pytest.raises(TokenError):
        scheduler.submit(GenerationRequest("x", stop_tokens=[-1]))
    with pytest.raises(GrammarError):
        scheduler.submit(GenerationRequest("x", sampling=SamplingConfig(grammar="bad")))
    with pytest.raises(OutOfSequencesError) as beams:
        scheduler.submit(GenerationRequest("x", beams=100))
    assert beams.value.limit == 8
    with pytest.raises(InvalidParameterError):
        GenerationRequest("x", n=3, beams=2)
    with pytest.raises(InvalidParameterError):
        scheduler.submit(GenerationRequest("x", max_tokens=2, resume={0: [1, 2]}))
    assert not scheduler.busy


def test_the_queue_is_bounded():
    scheduler = make(max_queue=3)
    handles = [scheduler.submit(GenerationRequest("x", max_tokens=2)) for _ in range(3)]
    with pytest.raises(QueueFullError) as full:
        scheduler.submit(GenerationRequest("x"))
    assert full.value.limit == 3
    scheduler.run_until_idle()
    assert all(h.done for h in handles)
    scheduler.submit(GenerationRequest("x", max_tokens=2))


def test_close_ends_what_is_open():
    scheduler = make()
    handle = scheduler.submit(GenerationRequest("x"))
    scheduler.close()
    scheduler.close()
    with pytest.raises(ClosedError):
        handle.result(0)
    with pytest.raises(ClosedError):
        scheduler.submit(GenerationRequest("x"))


def test_stats_add_up():
    engine = FakeEngine(n_ctx=512)
    scheduler = make(engine)
    run(scheduler, GenerationRequest("abc", n=2, max_tokens=5, sampling=SEEDED))
    stats = scheduler.stats()
    assert (stats.running, stats.waiting, stats.cached_sequences) == (0, 0, 1)
    assert stats.prefilled_tokens == 4
    assert stats.decoded_tokens == 8  # the first token of each needs no decode, the last is not decoded
    assert stats.used_cells == engine.memory.used_cells


# --------------------------------------------------------------------------------------- beams


def brute_force(prompt, length, n):
    """The n most probable texts of a length over four letters, by trying all."""
    engine = FakeEngine(logits=four_letters)
    start = engine.vocabulary.encode_prompt(prompt)
    scored = []
    for tokens in itertools.product(range(97, 101), repeat=length):
        total = 0.0
        for i, token in enumerate(tokens):
            logits = four_letters([*start, *tokens[:i]]).astype(np.float64)
            total += logits[token] - np.log(np.exp(logits).sum())
        scored.append((total, tokens))
    return sorted(scored, reverse=True)[:n]


def four_letters(tokens):
    row = np.full(258, -30, np.float32)
    row[97:101] = pseudo_random_logits(tokens)[97:101]
    return row


def test_wide_beams_find_the_best_texts_of_all():
    engine = FakeEngine(logits=four_letters, n_sequences=256, n_ctx=4096)
    request = GenerationRequest("beam", beams=64, n=5, max_tokens=4)
    final = run(make(engine, max_sequences=128), request)[0]
    expected = brute_force("beam", 4, 5)
    assert [c.tokens for c in final.completions] == [tokens for _, tokens in expected]
    assert [c.logprob for c in final.completions] == pytest.approx([s for s, _ in expected], abs=1e-4)


def test_beams_release_what_they_held_and_run_beside_samples():
    engine = FakeEngine(n_sequences=16, n_ctx=512)
    scheduler = make(engine, max_sequences=8, prefix_cache=False)
    beams = GenerationRequest("beams", beams=4, n=4, max_tokens=10)
    expected = [c.tokens for c in alone(beams).completions]
    samples = [GenerationRequest(f"s{i}", n=3, max_tokens=12) for i in range(3)]
    finals = run(scheduler, samples[0], beams, *samples[1:])
    assert [c.tokens for c in finals[1].completions] == expected
    assert engine.memory.used_cells == 0


def test_beams_give_way_and_start_again():
    engine = FakeEngine(n_sequences=16, n_ctx=128)
    beams = GenerationRequest("b" * 20, beams=4, n=4, max_tokens=20)
    expected = [c.tokens for c in alone(beams, n_ctx=1024).completions]
    finals = run(make(engine), GenerationRequest("a" * 30, max_tokens=80, sampling=SEEDED), beams)
    assert [c.tokens for c in finals[1].completions] == expected


def test_beams_stop_at_stop_texts():
    engine = FakeEngine(logits=four_letters, n_sequences=32, n_ctx=1024)
    request = GenerationRequest("beam", beams=8, n=8, max_tokens=6, stop=["a"])
    final = run(make(engine, max_sequences=16), request)[0]
    assert all("a" not in c.text for c in final.completions)
    stopped = [c for c in final.completions if c.stop == "a"]
    assert stopped
    assert all(c.finish_reason == "stop" for c in stopped)


def test_cancelled_beams():
    engine = FakeEngine(n_sequences=16, n_ctx=512)
    scheduler = make(engine, prefix_cache=False)
    handle = scheduler.submit(GenerationRequest("x", beams=4, n=2, max_tokens=100))
    for _ in range(6):
        scheduler.step()
    handle.cancel()
    scheduler.run_until_idle()
    assert isinstance(list(handle)[-1], Finished)
    assert engine.memory.used_cells == 0


def test_resumed_tokens_that_have_ended_already_are_refused():
    scheduler = make()
    eos = scheduler.engine.vocabulary.eos
    for values in ({"resume": {0: [97, eos]}}, {"resume": {0: [97, 98]}, "stop": ["ab"]}):
        with pytest.raises(InvalidParameterError, match="resume"):
            scheduler.submit(GenerationRequest("x", max_tokens=9, **values))


def test_what_is_no_request_is_refused():
    with pytest.raises(InvalidParameterError):
        make().submit("tell me")


def test_an_aborted_recurrent_state_is_computed_again():
    def abort_once(batch):
        if len(engine.batches) == 5:
            engine.batches.append(batch)
            raise DecodeAbortedError

    engine = FakeEngine(can_trim=False)
    engine._on_decode = abort_once
    requests = [GenerationRequest(p, max_tokens=12, sampling=GREEDY) for p in ("one", "two", "three")]
    finals = run(make(engine), *requests)
    assert [f.completions[0].tokens for f in finals] == [greedy_tokens(r.prompt, 12) for r in requests]


def test_a_failed_recurrent_batch_ends_its_requests_instead_of_failing_for_ever():
    def fail_together(batch):
        if len(batch) > 1 and batch.outputs.all():
            raise DecodeError(-3, "it failed")

    engine = FakeEngine(can_trim=False, on_decode=fail_together)
    scheduler = make(engine)
    handles = [scheduler.submit(GenerationRequest(p, max_tokens=12, sampling=GREEDY)) for p in "ab"]
    scheduler.run_until_idle(1000)
    assert all(h.done for h in handles)


def test_beams_that_need_more_cells_than_there_are_fail_instead_of_starting_again_for_ever():
    scheduler = make(FakeEngine(n_sequences=8, n_ctx=64))
    handle = scheduler.submit(GenerationRequest("x" * 30, max_tokens=30, beams=8, ignore_eos=True))
    scheduler.run_until_idle(1000)
    with pytest.raises(OutOfCellsError):
        handle.result(0)
    assert run(scheduler, GenerationRequest("y", max_tokens=3))[0].completions[0].tokens


@pytest.mark.parametrize("reason", ["cancelled", "deadline"])
def test_beams_that_are_stopped_give_what_they_have(reason):
    scheduler = make(FakeEngine(n_ctx=2048))
    deadline = 0.05 if reason == "deadline" else None
    handle = scheduler.submit(
        GenerationRequest("x", max_tokens=1000, beams=3, n=2, ignore_eos=True, deadline=deadline)
    )
    for _ in range(10):
        scheduler.step()
    if deadline is None:
        handle.cancel()
    else:
        time.sleep(deadline)
    scheduler.run_until_idle(10_000)
    events = list(handle)
    final = events[-1]
    assert [c.finish_reason for c in final.completions] == [reason] * 2
    assert all(len(c.tokens) >= 5 for c in final.completions)
    assert final.usage.completion_tokens == sum(len(c.tokens) for c in final.completions)
    for i, completion in enumerate(final.completions):
        assert "".join(e.text for e in events[:-1] if e.index == i) == completion.text


def test_the_tokens_of_finished_beams_are_counted():
    final = alone(GenerationRequest("x", max_tokens=1, beams=1))
    assert final.usage.completion_tokens == 1


def test_beams_that_ignore_the_end_never_take_it():
    def eager_to_end(tokens):
        row = pseudo_random_logits(tokens)
        row[257] = 20
        return row

    scheduler = make(FakeEngine(logits=eager_to_end))
    final = run(scheduler, GenerationRequest("x", max_tokens=6, beams=4, n=4, ignore_eos=True))[0]
    assert all(257 not in c.tokens and len(c.tokens) == 6 for c in final.completions)


def test_an_engine_closed_under_its_scheduler_leaves_nobody_waiting():
    engine = FakeEngine()
    scheduler = make(engine)
    handles = [scheduler.submit(GenerationRequest(p, max_tokens=50)) for p in "abc"]
    for _ in range(5):
        scheduler.step()
    engine.close()
    engine.memory.release = lambda sequence: (_ for _ in ()).throw(ClosedError("engine"))
    scheduler.run_until_idle(100)
    for handle in handles:
        with pytest.raises(ClosedError):
            handle.result(0)
