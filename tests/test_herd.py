"""A herd from threads and from asyncio."""

import asyncio
import gc
import threading
import time

import pytest

from llamaherd import (
    Failed,
    Finished,
    GenerationRequest,
    Herd,
    Model,
    SamplingConfig,
    SchedulerConfig,
    Token,
)
from llamaherd.errors import (
    ClosedError,
    InvalidParameterError,
    NativeError,
    QueueFullError,
    UnknownParameterError,
    UnsupportedError,
)
from llamaherd.files.synthesize import synthesize
from llamaherd.testing import FakeEngine

GREEDY = SamplingConfig(temperature=0)


@pytest.fixture
def herd():
    with Herd(FakeEngine(n_sequences=16, n_ctx=2048), max_sequences=8) as herd:
        yield herd


def wait_until_idle(herd):
    deadline = time.monotonic() + 10
    while herd._scheduler.busy and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not herd._scheduler.busy


def test_many_threads_use_one_herd(herd):
    expected = {
        i: herd.generate(GenerationRequest(f"p{i}", max_tokens=20, sampling=GREEDY)).text for i in range(10)
    }
    failures = []

    def work(i):
        for _ in range(5):
            if herd.generate(GenerationRequest(f"p{i}", max_tokens=20, sampling=GREEDY)).text != expected[i]:
                failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_leaving_a_stream_cancels(herd):
    for event in herd.stream(GenerationRequest("x", max_tokens=1500, sampling=GREEDY)):
        assert isinstance(event, Token)
        break
    gc.collect()
    wait_until_idle(herd)
    assert herd.stats().decoded_tokens < 1500


def test_a_stream_of_events(herd):
    *tokens, final = herd.stream(GenerationRequest("x", max_tokens=7, sampling=GREEDY))
    assert isinstance(final, Finished)
    assert "".join(t.text for t in tokens) == final.text
    assert final.timings.total > 0


def test_asyncio_streams_beside_each_other(herd):
    async def collect(i):
        return [e async for e in herd.astream(GenerationRequest(f"p{i}", max_tokens=9, sampling=GREEDY))]

    async def main():
        return await asyncio.gather(*(collect(i) for i in range(6)))

    for i, events in enumerate(asyncio.run(main())):
        assert isinstance(events[-1], Finished)
        expected = herd.generate(GenerationRequest(f"p{i}", max_tokens=9, sampling=GREEDY))
        assert events[-1].text == expected.text
        assert len(events) == 10


def test_cancelling_a_task_cancels_its_request(herd):
    async def main():
        async def consume():
            async for _ in herd.astream(GenerationRequest("x", max_tokens=1900, sampling=GREEDY)):
                await asyncio.sleep(0)

        task = asyncio.create_task(consume())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    wait_until_idle(herd)


def test_a_result_may_be_waited_for_with_a_timeout(herd):
    handle = herd.submit(GenerationRequest("x", max_tokens=1900, sampling=GREEDY))
    with pytest.raises(TimeoutError):
        handle.result(0.01)
    with pytest.raises(TimeoutError):
        herd.generate(GenerationRequest("y", max_tokens=1900, sampling=GREEDY), timeout=0.01)
    handle.cancel()
    wait_until_idle(herd)


def test_errors_of_a_request_reach_its_caller_and_the_herd_lives(herd):
    def explode(batch):
        if (batch.tokens == ord("!")).any():
            raise ZeroDivisionError("a bug")

    herd.engine._on_decode = explode
    *_, final = herd.stream(GenerationRequest("!"))
    assert isinstance(final, Failed)
    with pytest.raises(NativeError, match="a bug"):
        herd.generate(GenerationRequest("!"))
    assert (
        herd.generate(GenerationRequest("fine", max_tokens=3, sampling=GREEDY)).usage.completion_tokens == 3
    )


def test_closing_ends_what_runs():
    herd = Herd(FakeEngine(n_ctx=2048))
    handle = herd.submit(GenerationRequest("x", max_tokens=1900, sampling=GREEDY))
    herd.close()
    herd.close()
    assert handle.done
    with pytest.raises(ClosedError):
        herd.submit(GenerationRequest("x"))
    assert not herd._thread.is_alive()


def test_the_queue_pushes_back():
    gate = threading.Event()
    engine = FakeEngine(on_decode=lambda batch: gate.wait(10) and None)
    with Herd(engine, scheduler=SchedulerConfig(max_queue=2, max_sequences=1)) as herd:
        handles = [herd.submit(GenerationRequest("x", max_tokens=2))]
        time.sleep(0.1)  # it runs, and hangs in its decode
        handles += [herd.submit(GenerationRequest("x", max_tokens=2)) for _ in range(2)]
        with pytest.raises(QueueFullError):
            herd.submit(GenerationRequest("x"))
        gate.set()
        assert all(h.result(10) for h in handles)


def test_suggestions_are_distinct_ranked_and_repeatable(herd):
    seeded = SamplingConfig(temperature=1, seed=11)
    first = herd.suggest("prompt", n=8, max_tokens=3, sampling=seeded)
    assert len(first) == 8
    assert len({s.text.strip() for s in first}) == 8
    assert [s.score for s in first] == sorted((s.score for s in first), reverse=True)
    assert all(s.score == pytest.approx(s.logprob / len(s.tokens)) for s in first)
    assert herd.suggest("prompt", n=8, max_tokens=3, sampling=seeded) == first
    beams = herd.suggest("prompt", n=4, max_tokens=5, beam=True)
    assert beams == herd.suggest("prompt", n=4, max_tokens=5, beam=True)


# -------------------------------------------------------------------------------- on a tiny model


@pytest.fixture(scope="module")
def model(tiny_model_path):
    with Model.load(tiny_model_path) as model:
        yield model


def test_a_herd_on_a_model(model):
    with Herd(model, n_ctx=512, max_sequences=4, n_threads=1, n_threads_batch=1) as herd:
        assert herd.engine.memory.n_sequences == 8
        request = GenerationRequest("once", max_tokens=20, sampling=GREEDY, ignore_eos=True)
        alone = herd.generate(request)
        noise = [herd.submit(GenerationRequest(f"noise {i}", n=3, max_tokens=15)) for i in range(4)]
        assert herd.generate(request).completions[0].tokens == alone.completions[0].tokens
        assert all(h.result(60) for h in noise)


def test_a_grammar_that_ends_ends_the_text_even_where_end_tokens_are_ignored(model):
    with Herd(model, n_ctx=512, max_sequences=2, n_threads=1, n_threads_batch=1) as herd:
        for sampling in (
            SamplingConfig(grammar='root ::= "ab"'),
            SamplingConfig(json_schema='{"const": "ab"}'),
        ):
            request = GenerationRequest("once", max_tokens=20, sampling=sampling, ignore_eos=True)
            found = herd.generate(request).completions[0]
            assert (found.text.strip('"'), found.finish_reason) == ("ab", "stop")


def test_unknown_parameters_name_the_nearest(model):
    with pytest.raises(UnknownParameterError) as error:
        Herd(model, n_thread=2)
    assert error.value.nearest == "n_threads"
    with pytest.raises(TypeError, match="already made"):
        Herd(FakeEngine(), n_ctx=5)


def test_the_model_may_be_closed_first(tiny_model_path):
    model = Model.load(tiny_model_path)
    herd = Herd(model, n_ctx=512, n_threads=1)
    herd.generate(GenerationRequest("x", max_tokens=2))
    model.close()
    with pytest.raises(ClosedError):
        herd.generate(GenerationRequest("x", max_tokens=2))
    herd.close()


def test_a_stream_that_is_never_read_is_cancelled(herd):
    for leave in (lambda stream: None, lambda stream: stream.close()):
        leave(herd.stream(GenerationRequest("x", max_tokens=2000)))
        gc.collect()
        wait_until_idle(herd)
    assert herd.stats().decoded_tokens < 1000


def test_a_task_cancelled_while_it_submits_leaves_no_request(herd):
    async def read():
        async for _ in herd.astream(GenerationRequest("x", max_tokens=2000)):
            pass

    async def main():
        tasks = [asyncio.create_task(read()) for _ in range(8)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.2)

    asyncio.run(main())
    wait_until_idle(herd)
    assert herd.stats().decoded_tokens < 1000


def test_a_listener_may_close_the_herd():
    engine = FakeEngine(n_ctx=2048)
    herd = Herd(engine)
    handles = [herd.submit(GenerationRequest(p, max_tokens=2000)) for p in "abc"]
    handles[0].listen(herd.close)
    for handle in handles:
        with pytest.raises(ClosedError):
            handle.result(10)
    herd._thread.join(10)
    assert engine.closed
    herd.close()


def test_what_is_no_model_or_no_config_is_refused():
    with pytest.raises(InvalidParameterError):
        Herd(FakeEngine(), scheduler=5)
    for model in (None, 5, "model.gguf"):
        with pytest.raises(InvalidParameterError):
            Herd(model)


def test_suggestions_of_the_wrong_kind_are_refused(herd):
    with pytest.raises(InvalidParameterError):
        herd.suggest("x", n="a")
    with pytest.raises(UnknownParameterError, match="stop"):
        herd.suggest("x", stops=["a"])


def test_a_model_closed_under_its_herd_ends_the_requests(tiny_model_path):
    model = Model.load(tiny_model_path)
    herd = Herd(model, n_ctx=512, max_sequences=4, n_threads=1, n_threads_batch=1)
    sampling = SamplingConfig(grammar="root ::= .+")  # which asks the model's vocabulary at every token
    handles = [herd.submit(GenerationRequest(f"p{i}", max_tokens=400, sampling=sampling)) for i in range(6)]
    next(iter(handles[0]))
    model.close()
    for handle in handles:
        with pytest.raises(ClosedError):
            handle.result(10)
    with pytest.raises(ClosedError):
        herd.generate(GenerationRequest("x"), timeout=10)
    herd.close()


@pytest.mark.parametrize("architecture", ["bert", "t5"])
def test_encoders_are_refused(tmp_path, architecture):
    path = synthesize(tmp_path / "encoder.gguf", architecture)
    with Model.load(path) as model, pytest.raises(UnsupportedError):
        Herd(model, n_ctx=256, n_threads=1)


def test_closing_while_a_step_begins_does_not_wait_for_ever():
    herd = Herd(FakeEngine())
    scheduler, begun = herd._scheduler, threading.Event()
    step = scheduler.step

    def late_step():
        begun.set()
        herd._stop.wait(5)
        time.sleep(0.05)  # close() has woken the scheduler, and the step will clear that
        return step()

    scheduler.step = late_step
    scheduler.wake()
    assert begun.wait(5)
    closing = threading.Thread(target=herd.close, daemon=True)
    closing.start()
    closing.join(5)
    assert not closing.is_alive()
