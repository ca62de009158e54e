"""Real processes that really die; their engine is a fake one, so that they do so quickly."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from llamaherd import Failed, Finished, SamplingConfig, Token
from llamaherd.config import SchedulerConfig
from llamaherd.errors import (
    ClosedError,
    ModelNotFoundError,
    QueueFullError,
    SlowReaderError,
    WorkerDiedError,
)
from llamaherd.worker import Supervisor

from .conftest import collect, fake_config, request, supervised, until
from .engines import ABORTS, FAULTS, GROWS, SLEEPS


def test_a_request_runs() -> None:
    async def main() -> None:
        async with supervised(fake_config()) as supervisor:
            tokens, end = await collect(supervisor, request(n=3))
            assert isinstance(end, Finished)
            assert len(tokens) == 150
            assert all(len(c.tokens) == 50 for c in end.completions)
            text = "".join(t.text for t in tokens if t.index == 1)
            assert end.completions[1].text == text

    asyncio.run(main())


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_streams_go_on_where_they_were_when_the_worker_is_killed(temperature: float) -> None:
    async def main() -> None:
        async with supervised(fake_config()) as supervisor:
            wanted = [
                request(
                    f"prompt {i}", max_tokens=400, n=1 + i % 3, sampling=SamplingConfig(temperature, seed=i)
                )
                for i in range(8)
            ]
            undisturbed = await asyncio.gather(*(collect(supervisor, r) for r in wanted))

            async def kill() -> None:
                for _ in range(3):
                    before = supervisor.client.events
                    await until(lambda n=before: supervisor.client.events > n + 200)
                    assert supervisor.pid is not None
                    os.kill(supervisor.pid, signal.SIGKILL)
                    await until(lambda: not supervisor.ready)

            disturbed, _ = await asyncio.gather(
                asyncio.gather(*(collect(supervisor, r) for r in wanted)), kill()
            )
            assert supervisor.restarts == 3
            assert "SIGKILL" in supervisor.last_death
            for (tokens, end), (others, other_end) in zip(undisturbed, disturbed, strict=True):
                assert isinstance(end, Finished)
                assert isinstance(other_end, Finished)
                assert _by_candidate(tokens) == _by_candidate(others)
                assert end.completions == other_end.completions
                assert end.usage.completion_tokens == other_end.usage.completion_tokens

    asyncio.run(main())


def _by_candidate(tokens: list[Token]) -> list[Token]:
    return sorted(tokens, key=lambda t: t.index)


@pytest.mark.parametrize(("deed", "how"), [(ABORTS, "SIGABRT"), (FAULTS, "SIGSEGV")])
def test_a_request_that_kills_the_worker_twice_fails_and_the_others_live(deed: str, how: str) -> None:
    async def main() -> None:
        async with supervised(fake_config()) as supervisor:
            good = [request(f"good {i}", max_tokens=300) for i in range(6)]
            alone = [await collect(supervisor, r) for r in good]
            running = [asyncio.create_task(collect(supervisor, r)) for r in good]
            await asyncio.sleep(0.1)
            _, bad = await collect(supervisor, request("bad" + deed))
            assert isinstance(bad, Failed)
            assert isinstance(bad.error, WorkerDiedError)
            assert how in str(bad.error)
            assert supervisor.restarts == 2
            for task, (tokens, _) in zip(running, alone, strict=True):
                others, end = await task
                assert isinstance(end, Finished)
                assert others == tokens
            _, after = await collect(supervisor, request("after"))
            assert isinstance(after, Finished)
            assert supervisor.restarts == 2

    asyncio.run(main())


def test_a_worker_that_is_stopped_is_replaced() -> None:
    async def main() -> None:
        async with supervised(fake_config(), heartbeat_timeout=4.0) as supervisor:
            expected = await collect(supervisor, request(max_tokens=300))
            running = asyncio.create_task(collect(supervisor, request(max_tokens=300)))
            await asyncio.sleep(0.2)
            first = supervisor.pid
            assert first is not None
            os.kill(first, signal.SIGSTOP)
            tokens, end = await asyncio.wait_for(running, 30)
            assert isinstance(end, Finished)
            assert tokens == expected[0]
            assert supervisor.pid != first
            assert "SIGSTOP" in supervisor.last_death
            assert not psutil.pid_exists(first)

    asyncio.run(main())


def test_a_batch_that_never_ends_is_replaced_and_its_request_fails() -> None:
    async def main() -> None:
        async with supervised(fake_config(), step_timeout=0.5) as supervisor:
            _, end = await asyncio.wait_for(collect(supervisor, request("x" + SLEEPS)), 60)
            assert isinstance(end, Failed)
            assert isinstance(end.error, WorkerDiedError)
            assert "stuck" in str(end.error)

    asyncio.run(main())


def test_a_worker_over_its_memory_limit_is_replaced() -> None:
    async def main() -> None:
        async with supervised(fake_config(memory_limit=300 << 20)) as supervisor:
            good = asyncio.create_task(collect(supervisor, request(max_tokens=200)))
            _, end = await asyncio.wait_for(collect(supervisor, request("x" + GROWS)), 60)
            assert isinstance(end, Failed)
            assert "limit" in str(end.error)
            assert isinstance((await good)[1], Finished)

    asyncio.run(main())


def test_what_keeps_a_worker_from_starting_is_said() -> None:
    async def main() -> None:
        supervisor = Supervisor(fake_config(engine="tests.worker.engines:refusing"))
        with pytest.raises(ModelNotFoundError, match=r"/no/such\.gguf"):
            await supervisor.start()
        await supervisor.close()

    asyncio.run(main())


def test_restarts_that_lead_nowhere_slow_down() -> None:
    async def main() -> None:
        supervisor = Supervisor(fake_config(engine="tests.worker.engines:broken"))
        began = time.monotonic()
        starting = asyncio.create_task(supervisor.start())
        await until(lambda: supervisor.restarts >= 5)
        assert time.monotonic() - began > 0.7  # 0.25 s and 0.5 s of waiting, beside the starts themselves
        assert "SIGABRT" in supervisor.last_death
        starting.cancel()
        await supervisor.close()

    asyncio.run(main())


def test_a_cancelled_stream_frees_its_sequence_at_once() -> None:
    async def main() -> None:
        async with supervised(fake_config()) as supervisor:
            stream = supervisor.client.submit(request(max_tokens=8000))
            await anext(stream)
            stream.cancel()
            await until(lambda: supervisor.stats.steps > 0 and supervisor.stats.running == 0, 5)
            assert supervisor.client.open_requests == 0

    asyncio.run(main())


def test_a_reader_that_does_not_read_is_cut_off() -> None:
    async def main() -> None:
        async with supervised(fake_config(), max_buffered_events=64) as supervisor:
            stream = supervisor.client.submit(request(max_tokens=5000))
            await until(lambda: supervisor.client.events > 64)
            events = [event async for event in stream]
            assert isinstance(events[-1], Failed)
            assert isinstance(events[-1].error, SlowReaderError)
            await until(lambda: supervisor.stats.running == 0, 5)

    asyncio.run(main())


def test_the_queue_is_bounded_and_what_it_holds_outlives_a_death() -> None:
    async def main() -> None:
        scheduler = SchedulerConfig(max_sequences=2, max_queue=5)
        async with supervised(fake_config(scheduler=scheduler)) as supervisor:
            streams = [supervisor.client.submit(request(f"{i}", max_tokens=100)) for i in range(7)]
            with pytest.raises(QueueFullError):
                supervisor.client.submit(request())
            await anext(streams[0])
            assert supervisor.pid is not None
            os.kill(supervisor.pid, signal.SIGKILL)
            ends = await asyncio.gather(*(s.result() for s in streams))
            assert all(len(e.completions[0].tokens) == 100 for e in ends)

    asyncio.run(main())


def test_calls_are_answered_over_a_death() -> None:
    async def main() -> None:
        async with supervised(fake_config()) as supervisor:
            assert await supervisor.client.tokenize("ab") == [256, 97, 98]
            assert supervisor.pid is not None
            os.kill(supervisor.pid, signal.SIGKILL)
            assert await supervisor.client.detokenize([97, 98]) == "ab"

    asyncio.run(main())


def test_closing_ends_everything_and_leaves_nothing_behind() -> None:
    async def main() -> None:
        supervisor = Supervisor(fake_config())
        await supervisor.start()
        pid, folder = supervisor.pid, supervisor._folder
        stream = supervisor.client.submit(request(max_tokens=8000))
        await anext(stream)
        await supervisor.close()
        events = [event async for event in stream]
        assert isinstance(events[-1], Failed)
        assert isinstance(events[-1].error, ClosedError)
        with pytest.raises(ClosedError):
            supervisor.client.submit(request())
        assert pid is not None
        assert not psutil.pid_exists(pid)
        assert folder is not None
        assert not folder.exists()

    asyncio.run(main())


def test_a_worker_does_not_outlive_its_server(tmp_path: Path) -> None:
    program = (
        "import asyncio, os, sys\n"
        "from llamaherd.worker import Supervisor, WorkerConfig\n"
        "async def main():\n"
        "    s = Supervisor(WorkerConfig(engine='tests.worker.engines:fake'))\n"
        "    await s.start()\n"
        "    print(s.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    import subprocess
    import sys

    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{program}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    pid = int(run.stdout)
    for _ in range(500):
        if not psutil.pid_exists(pid):
            return
        time.sleep(0.01)
    raise AssertionError("the worker lives on")
