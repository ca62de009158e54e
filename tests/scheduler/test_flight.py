"""Several batches under way at once: nobody can tell from the texts."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from llamaherd.config import SamplingConfig, SchedulerConfig
from llamaherd.engine.picks import pick_token
from llamaherd.engine.protocol import Batch, FloatArray, PipelinedEngine, Row
from llamaherd.errors import DecodeError, LlamaherdError, StageLostError
from llamaherd.logits import log_normalizers
from llamaherd.scheduler.loop import Scheduler
from llamaherd.testing import FakeEngine
from llamaherd.types import GenerationRequest, Token


class FakePipeline(FakeEngine):
    """Computes at once, but hands the logits out when they are collected, in order."""

    depth = 3

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.under_way: deque[object] = deque()
        self.most_under_way = 0
        self.drawn = 0

    def submit(self, batch: Batch) -> object:
        result: FloatArray | list[Row] | LlamaherdError
        try:
            result = super().decode(batch).copy()
            if batch.draws is not None:
                result = self._rows(result, batch)
        except LlamaherdError as error:
            result = error
        ticket = (object(), result)
        self.under_way.append(ticket)
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        assert len(self.under_way) <= self.depth
        return ticket

    def _rows(self, logits: FloatArray, batch: Batch) -> list[Row]:
        draws = [d for d, wanted in zip(batch.draws or (), batch.outputs, strict=True) if wanted]
        self.drawn += sum(draw is not None for draw in draws)
        return [
            row if draw is None else pick_token(self.make_sampler(draw.sampling), row, norm, draw)
            for row, norm, draw in zip(logits, log_normalizers(logits), draws, strict=True)
        ]

    def can_draw(self, config: SamplingConfig) -> bool:
        return config.temperature > 0

    def collect(self, ticket: Any) -> FloatArray | list[Row]:
        assert self.under_way.popleft() is ticket
        if isinstance(ticket[1], LlamaherdError):
            raise ticket[1]
        return ticket[1]

    def decode(self, batch: Batch) -> FloatArray:
        raise AssertionError("a pipeline is kept full")


def requests(seed: int, n: int = 12) -> list[GenerationRequest]:
    dice = random.Random(seed)
    made = []
    for i in range(n):
        if dice.random() < 0.2:
            made.append(GenerationRequest(f"beams {i}", max_tokens=8, n=2, beams=3))
            continue
        made.append(
            GenerationRequest(
                "shared beginning of a prompt " * dice.randint(0, 4) + str(i),
                max_tokens=dice.randint(1, 25),
                n=dice.randint(1, 4),
                sampling=SamplingConfig(seed=i, temperature=1.1 * dice.randint(0, 4)),
                logprobs=dice.randint(0, 2),
                ignore_eos=dice.random() < 0.3,
                client=str(i % 3),
            )
        )
    return made


def results(engine: FakeEngine, wanted: list[GenerationRequest], **config: Any) -> list[object]:
    scheduler = Scheduler(engine, SchedulerConfig(**config))
    handles = [scheduler.submit(r) for r in wanted]
    scheduler.run_until_idle(20_000)
    found: list[object] = []
    for handle in handles:
        events = list(handle)
        tops = [e.top_logprobs for e in events if isinstance(e, Token) and e.index == 0]
        found.append([(c.text, c.tokens, c.logprobs, tops) for c in events[-1].completions])
    scheduler.close()
    assert engine.memory.used_cells == 0
    return found


def test_it_is_a_pipelined_engine():
    assert isinstance(FakePipeline(), PipelinedEngine)
    assert not isinstance(FakeEngine(), PipelinedEngine)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("n_ctx", [2048, 420])
def test_texts_are_those_of_one_batch_at_a_time(seed, n_ctx):
    options = {"n_sequences": 12, "n_ctx": n_ctx, "n_batch": 16}
    engine = FakePipeline(**options)
    wanted = requests(seed)
    expected = results(FakeEngine(**options), wanted, max_sequences=6, prefill_chunk=16)
    assert results(engine, wanted, max_sequences=6, prefill_chunk=16) == expected
    assert engine.most_under_way == 3
    assert engine.drawn > 20
    assert not engine.under_way


def test_a_prompts_chunks_are_under_way_together():
    engine = FakePipeline(n_sequences=4, n_ctx=512, n_batch=16)
    scheduler = Scheduler(engine, SchedulerConfig(prefill_chunk=16))
    handle = scheduler.submit(GenerationRequest("x" * 100, max_tokens=3, sampling=SamplingConfig(seed=1)))
    for _ in range(2):
        scheduler.step()
    assert len(engine.under_way) == 2
    scheduler.run_until_idle()
    assert len(handle.result(0).completions[0].tokens) == 3


@pytest.mark.parametrize("seed", range(10))
def test_cancelled_and_failing_requests_leave_the_others_alone(seed):
    dice = random.Random(seed)
    wanted = [r for r in requests(seed) if r.beams is None]
    options = {"n_sequences": 12, "n_ctx": 700, "n_batch": 16}
    expected = results(FakeEngine(**options), wanted, max_sequences=6, prefill_chunk=16)

    def fail(batch: Batch) -> None:
        if (batch.tokens == ord("!")).sum() > 5:  # a prompt of them, not one that was drawn
            raise DecodeError(-3, "a prompt with ! fails")

    engine = FakePipeline(**options, on_decode=fail)
    scheduler = Scheduler(engine, SchedulerConfig(max_sequences=6, prefill_chunk=16))
    handles = [scheduler.submit(r) for r in wanted]
    others = [
        scheduler.submit(
            GenerationRequest(text * 9, max_tokens=40, n=2, sampling=SamplingConfig(seed=1), client="b")
        )
        for text in ("a!", "fine ", "fine, too ", "b!")
    ]
    for _ in range(20_000):
        if dice.random() < 0.05:
            others[dice.choice((1, 2))].cancel()
        if not scheduler.step():
            break
    found = [[(c.text, c.tokens) for c in h.result(0).completions] for h in handles]
    assert found == [[completion[:2] for completion in completions] for completions in expected]
    for bad in (others[0], others[3]):
        with pytest.raises(DecodeError):
            bad.result(0)
    scheduler.close()
    assert engine.memory.used_cells == 0


def test_an_engine_that_has_lost_everything_fails_what_runs_and_serves_what_comes():
    lost = False

    def lose(batch: Batch) -> None:
        nonlocal lost
        if lost:
            lost = False
            for sequence in engine.memory.tokens:
                engine.memory.tokens[sequence].clear()
                engine.memory._cells[sequence].clear()
            raise StageLostError(1, "no room for another")

    engine = FakePipeline(n_sequences=8, n_ctx=512, on_decode=lose)
    scheduler = Scheduler(engine, SchedulerConfig(max_sequences=4))
    first = scheduler.submit(GenerationRequest("kept idle", max_tokens=3))
    scheduler.run_until_idle()
    assert first.result(0)
    running = [scheduler.submit(GenerationRequest(f"r{i}", max_tokens=50)) for i in range(3)]
    for _ in range(6):
        scheduler.step()
    lost = True
    scheduler.run_until_idle()
    for handle in running:
        with pytest.raises(StageLostError):
            handle.result(0)
    again = scheduler.submit(GenerationRequest("kept idle", max_tokens=3))
    scheduler.run_until_idle()
    assert len(again.result(0).completions[0].tokens) == 3
