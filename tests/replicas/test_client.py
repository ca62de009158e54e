"""Streams over several replicas, which break off, stay silent or are gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import msgspec
import pytest

from llamaherd.errors import (
    ClosedError,
    QueueFullError,
    RequestError,
    WorkerDiedError,
    WorkerError,
    WorkerStartError,
)
from llamaherd.replicas.client import ReplicaLostError, ReplicasClient
from llamaherd.replicas.fleet import Fleet, ReplicaStatus, add_stats
from llamaherd.types import (
    Completion,
    Failed,
    Finished,
    GenerationRequest,
    Timings,
    Token,
    Usage,
)
from llamaherd.worker import wire


class CountingReplica:
    """Says the numbers from where it is asked to go on; breaks off after ``breaks`` tokens."""

    def __init__(self, *, breaks: int = 10**9) -> None:
        self.breaks = breaks
        self.asked: list[wire.WireRequest] = []
        self.closed = 0
        self.life = "first"
        self.gone = False
        self.hold = asyncio.Event()
        self.hold.set()

    async def generate(self, submit: bytes) -> AsyncGenerator[bytes, None]:
        message = wire.decode_down(submit)
        assert isinstance(message, wire.Submit)
        request = message.request
        self.asked.append(request)
        before = request.resume.get(0, [])
        try:
            for number in range(len(before), request.max_tokens):
                await self.hold.wait()
                await asyncio.sleep(0)
                if self.breaks == 0:
                    raise ReplicaLostError("it broke off")
                self.breaks -= 1
                last = number == request.max_tokens - 1
                token = Token(0, number, f"{number} ", -1.0, (), "length" if last else None)
                yield wire.encode(wire.Events(tokens=[(0, token)]))
            text = "".join(f"{n} " for n in range(request.max_tokens))
            tokens = tuple(range(request.max_tokens))
            completion = Completion(0, text, tokens, (-1.0,) * len(tokens), "length", None)
            finished = Finished((completion,), Usage(3, len(tokens)), Timings(0, 0, 0))
            yield wire.encode(wire.Events(finished=[(0, finished)]))
        finally:
            self.closed += 1

    async def call(self, call: bytes) -> bytes:
        if self.gone:
            raise ReplicaLostError("it is gone")
        return wire.encode(wire.Reply(0, tokens=[1, 2, 3]))

    async def status(self) -> bytes:
        if self.gone:
            raise ReplicaLostError("it is gone")
        stats = wire.Stats(running=1, step_seconds=0.5)
        look = ReplicaStatus(
            True, stats, wire.ModelInfo(n_ctx=64), host="here", pid=1, restarts=2, life=self.life
        )
        return msgspec.msgpack.encode(look)


def client_of(*replicas: Any, **options: Any) -> ReplicasClient:
    names = {f"r{i}": replica for i, replica in enumerate(replicas)}
    client = ReplicasClient(names, **{"max_open": 8, **options})
    for name in names:
        client.set_ready(name, True)
    return client


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_stream_goes_on_at_another_replica() -> None:
    async def test() -> None:
        one, other = CountingReplica(breaks=4), CountingReplica()
        client = client_of(one, other)
        stream = client.submit(GenerationRequest("x", max_tokens=10))
        events = [event async for event in stream]
        assert [e.token for e in events[:-1]] == list(range(10))
        end = events[-1]
        assert isinstance(end, Finished)
        assert end.completions[0].tokens == tuple(range(10))
        assert end.completions[0].text == "".join(f"{n} " for n in range(10))
        assert other.asked[0].resume == {0: [0, 1, 2, 3]}
        assert one.asked[0].sampling.seed == other.asked[0].sampling.seed is not None
        assert client.open_requests == 0
        assert one.closed == other.closed == 1

    run(test)


def test_it_waits_until_a_replica_is_there() -> None:
    async def test() -> None:
        one = CountingReplica(breaks=2)
        client = client_of(one)
        task = asyncio.create_task(client.submit(GenerationRequest("x", max_tokens=5)).result())
        await asyncio.sleep(0.5)
        assert not task.done()
        one.breaks = 100
        client.set_ready("r0", True)
        assert (await task).completions[0].tokens == (0, 1, 2, 3, 4)

    run(test)


def test_a_request_that_every_replica_breaks_over_fails() -> None:
    async def test() -> None:
        replicas = [CountingReplica(breaks=0) for _ in range(6)]
        with pytest.raises(WorkerDiedError, match="5 replicas were lost"):
            await client_of(*replicas).submit(GenerationRequest("x", max_tokens=5)).result()
        assert sum(len(r.asked) for r in replicas) == 5

    run(test)


def test_cancelling_closes_the_replica_side() -> None:
    async def test() -> None:
        one = CountingReplica()
        client = client_of(one)
        async with client.submit(GenerationRequest("x", max_tokens=10**6)) as stream:
            await anext(stream)
        await asyncio.sleep(0.05)
        assert one.closed == 1
        assert client.open_requests == 0
        assert client.loads == {"r0": 0}

    run(test)


def test_a_replicas_own_failure_is_passed_on() -> None:
    class Refusing(CountingReplica):
        async def generate(self, submit: bytes) -> AsyncGenerator[bytes, None]:
            yield wire.encode(wire.Events(failed=[(0, wire.pack_error(RequestError("no")), Usage(1, 0))]))

    async def test() -> None:
        (event,) = [e async for e in client_of(Refusing()).submit(GenerationRequest("x", max_tokens=5))]
        assert isinstance(event, Failed)
        assert isinstance(event.error, RequestError)

    run(test)


def test_limits_and_the_end() -> None:
    async def test() -> None:
        one = CountingReplica()
        one.hold.clear()
        client = client_of(one, max_open=2)
        streams = [client.submit(GenerationRequest("x", max_tokens=5)) for _ in range(2)]
        with pytest.raises(QueueFullError):
            client.submit(GenerationRequest("x", max_tokens=5))
        client.refuse(ClosedError("server"))
        for stream in streams:
            with pytest.raises(ClosedError):
                await stream.result()
        with pytest.raises(ClosedError):
            client.submit(GenerationRequest("x", max_tokens=5))
        with pytest.raises(ClosedError):
            await client.tokenize("x")

    run(test)


def test_calls_go_to_another_replica_too() -> None:
    async def test() -> None:
        gone, there = CountingReplica(), CountingReplica()
        gone.gone = True
        assert await client_of(gone, there).tokenize("x") == [1, 2, 3]

    run(test)


def test_a_silent_replica_is_given_up() -> None:
    async def test() -> None:
        silent, other = CountingReplica(), CountingReplica()
        client = client_of(silent, other)
        stream = client.submit(GenerationRequest("x", max_tokens=6))
        assert isinstance(await anext(stream), Token)
        silent.hold.clear()
        await asyncio.sleep(0.05)
        client.give_up("r0", "it gives no sign of life")
        end = await stream.result()
        assert end.completions[0].tokens == tuple(range(6))
        assert other.asked[0].resume
        await asyncio.sleep(0.05)
        assert silent.closed == 1
        assert client.loads == {"r0": 0, "r1": 0}

    run(test)


def test_calls_that_wait_for_a_replica_fail_with_the_refusal() -> None:
    async def test() -> None:
        client = client_of(CountingReplica())
        client.set_ready("r0", False)
        waiting = asyncio.create_task(client.tokenize("x"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        client.refuse(WorkerError("none comes back"))
        client.set_ready("r0", False)
        with pytest.raises(WorkerError, match="none comes back"):
            await waiting
        client.set_ready("r0", True)
        assert await client.tokenize("x") == [1, 2, 3]

    run(test)


class FixedLauncher:
    def __init__(self, replicas: dict[str, Any]) -> None:
        self.replicas, self.closed = replicas, 0

    async def start(self) -> dict[str, Any]:
        return self.replicas

    async def close(self) -> None:
        self.closed += 1


def test_a_fleet_notices_who_is_gone_and_who_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamaherd.replicas.fleet._LOOK_EVERY", 0.02)

    async def test() -> None:
        replicas = {"a": CountingReplica(), "b": CountingReplica()}
        launcher = FixedLauncher(replicas)
        fleet = Fleet(wire.WorkerConfig(), launcher)
        assert (await fleet.start()).n_ctx == 64
        assert fleet.ready
        assert fleet.restarts == 4
        assert fleet.stats.running == 2
        replicas["a"].gone = True
        await asyncio.sleep(0.2)
        assert [look.ready for look in fleet.replicas.values()] == [False, True]
        assert fleet.ready
        replicas["a"].gone, replicas["a"].life = False, "second"
        await asyncio.sleep(0.2)
        assert [look.ready for look in fleet.replicas.values()] == [True, True]
        assert fleet.restarts == 7  # the replica, two workers of the one before, and those that were
        assert "replica a was lost" in fleet.last_death
        await fleet.close()
        assert launcher.closed == 1

    run(test)


def test_requests_fail_when_no_replica_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamaherd.replicas.fleet._LOOK_EVERY", 0.02)
    monkeypatch.setattr("llamaherd.replicas.fleet._DESPAIR", 0.2)

    async def test() -> None:
        only = CountingReplica()
        only.hold.clear()
        fleet = Fleet(wire.WorkerConfig(), FixedLauncher({"a": only}))
        await fleet.start()
        stream = fleet.client.submit(GenerationRequest("x", max_tokens=5))
        only.gone = True
        with pytest.raises(WorkerError, match=r"no replica of model has answered for 0\.2 s"):
            await stream.result()
        with pytest.raises(WorkerError, match="no replica"):
            fleet.client.submit(GenerationRequest("x", max_tokens=5))
        only.gone = False
        only.hold.set()
        await asyncio.sleep(0.2)
        assert (await fleet.client.submit(GenerationRequest("x", max_tokens=5)).result()).completions
        await fleet.close()

    run(test)


def test_a_fleet_that_cannot_start_says_why() -> None:
    class Broken(CountingReplica):
        async def status(self) -> bytes:
            look = ReplicaStatus(False, error=wire.pack_error(WorkerStartError("no such file", "x")))
            return msgspec.msgpack.encode(look)

    async def test() -> None:
        with pytest.raises(WorkerStartError, match="no such file"):
            await Fleet(wire.WorkerConfig(), FixedLauncher({"a": Broken()})).start()

    run(test)


def test_figures_are_added() -> None:
    parts = [wire.Stats(running=2, steps=5, step_seconds=1.0), wire.Stats(running=1, step_seconds=2.0)]
    assert add_stats(parts) == wire.Stats(running=3, steps=5, step_seconds=2.0)
    assert add_stats([]) == wire.Stats()
