"""Stages in processes of their own: the same logits, whatever happens to the processes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import zmq

from llamaherd import Herd
from llamaherd.config import SamplingConfig
from llamaherd.engine.model import Model
from llamaherd.errors import DecodeAbortedError, StageLostError, UnsupportedFileError, WorkerStartError
from llamaherd.shard import wire
from llamaherd.shard.link import RemoteChain
from llamaherd.shard.local import LocalStages
from llamaherd.shard.opening import open_stages
from llamaherd.shard.pipeline import Pipeline
from llamaherd.shard.work import Operation, Work
from llamaherd.types import GenerationRequest

from .conftest import CUTS, SETTINGS, batch_of, conversation, equal


class Stages:
    """A pipeline of processes, and what a test needs beside it."""

    def __init__(self, path: Path, *, frozen_after: float = 30.0, **settings: object) -> None:
        activations = str(settings.pop("activations", "f32"))
        self.deployment = LocalStages(path, CUTS, context_params=SETTINGS | settings, activations=activations)
        self.chain = RemoteChain(self.deployment, frozen_after=frozen_after)
        self.pipeline = Pipeline(self.chain, Model.load(path, vocab_only=True))

    @property
    def pids(self) -> list[int]:
        return self.deployment.pids


@pytest.fixture(scope="module")
def shared_stages(six_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    os.environ["LLAMAHERD_SLICES"] = str(tmp_path_factory.getbasetemp() / "slices")
    stages = Stages(six_layers, kv_unified=False)
    yield stages
    stages.pipeline.close()


@pytest.fixture
def stages(shared_stages: Stages) -> Stages:
    shared_stages.pipeline.memory.clear()
    return shared_stages


def test_processes_compute_what_one_does(stages, make_whole):
    assert all(equal(conversation(make_whole(kv_unified=False)), conversation(stages.pipeline)))
    assert [f.start for f in stages.chain.facts] == [0, 1, 4]
    # a middle stage holds neither vocabulary nor head
    assert stages.chain.facts[1].n_vocab == 32 < stages.chain.facts[2].n_vocab
    until(lambda: all(s.seconds > 0 and s.latency > 0 for s in stages.chain.status()))
    status = stages.chain.status()
    assert all(s.seconds > 0 and s.refused == 0 for s in status)


def test_each_process_maps_its_slice_only(stages, six_layers):
    for pid, (start, end) in zip(stages.pids, ((0, 1), (1, 4), (4, 6)), strict=True):
        files = {m.path for m in psutil.Process(pid).memory_maps() if m.path.endswith(".gguf")}
        (mapped,) = files
        assert f"-{start}-{end}." in mapped
        assert mapped != str(six_layers)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_killed_stage_is_replaced_and_nothing_changes(stages, make_whole, stage):
    whole, chain = make_whole(kv_unified=False), stages.pipeline
    recoveries = chain.recoveries
    for engine in (whole, chain):
        for _ in range(2):
            engine.memory.allocate()
        engine.decode(batch_of(engine, {0: list(range(100))}))
        engine.memory.fork(0, 70)
        engine.decode(batch_of(engine, {0: [5], 1: [6], 2: [7]}))
    pid = stages.pids[stage]
    os.kill(pid, signal.SIGKILL)
    for i in range(3):
        last = {0: [i], 1: [i], 2: [i]}
        assert np.array_equal(whole.decode(batch_of(whole, last)), chain.decode(batch_of(chain, last)))
    assert chain.recoveries == recoveries + 1
    assert stages.pids[stage] != pid


def test_a_stopped_stage_is_replaced(six_layers, make_whole):
    stages = Stages(six_layers, frozen_after=3.0, kv_unified=False)
    whole, chain = make_whole(kv_unified=False), stages.pipeline
    try:
        for engine in (whole, chain):
            engine.memory.allocate()
            engine.decode(batch_of(engine, {0: [1, 2, 3]}))
        pid = stages.pids[1]
        os.kill(pid, signal.SIGSTOP)
        text = {0: [4]}
        assert np.array_equal(whole.decode(batch_of(whole, text)), chain.decode(batch_of(chain, text)))
        assert not psutil.pid_exists(pid)
    finally:
        chain.close()


def test_streams_over_a_lost_stage(six_layers, make_whole):
    requests = [
        GenerationRequest(
            f"request {i}",
            max_tokens=60,
            n=1 + i % 2,
            sampling=SamplingConfig(temperature=0.9 * (i % 3), seed=i),
            ignore_eos=True,
        )
        for i in range(4)
    ]
    with Herd(make_whole(kv_unified=False), max_sequences=6) as herd:
        expected = [herd.submit(r).result(60).completions for r in requests]
    stages = Stages(six_layers, kv_unified=False)
    with Herd(stages.pipeline, max_sequences=6) as herd:
        for kill in (None, 0, 1, 2):
            handles = [herd.submit(r) for r in requests]
            if kill is not None:
                while herd.stats().running < 6:
                    time.sleep(0.01)
                os.kill(stages.pids[kill], signal.SIGKILL)
            found = [h.result(60).completions for h in handles]
            assert [[c.tokens for c in cs] for cs in found] == [[c.tokens for c in cs] for cs in expected]
        assert stages.pipeline.recoveries == 3


def test_several_batches_are_under_way_at_once(stages, make_whole):
    whole, chain = make_whole(kv_unified=False), stages.pipeline
    for engine in (whole, chain):
        for _ in range(3):
            engine.memory.allocate()
    tickets = [chain.submit(batch_of(chain, {s: list(range(s, s + 40))})) for s in range(3)]
    tickets.append(chain.submit(batch_of(chain, {0: [1], 1: [2]})))
    os.kill(stages.pids[1], signal.SIGKILL)
    found = [chain.collect(t).copy() for t in tickets]
    expected = [whole.decode(batch_of(whole, {s: list(range(s, s + 40))})).copy() for s in range(3)]
    expected.append(whole.decode(batch_of(whole, {0: [1], 1: [2]})).copy())
    assert all(equal(expected, found))


def test_abort_stops_a_prefill_and_loses_nothing(stages, make_whole):
    whole, chain = make_whole(kv_unified=False), stages.pipeline
    for engine in (whole, chain):
        engine.memory.allocate()
        engine.decode(batch_of(engine, {0: [1, 2, 3]}))
    timer = threading.Timer(0.01, chain.abort)
    timer.start()
    try:
        chain.decode(batch_of(chain, {0: [1] * 125}))
        chain.memory.trim(0, 3)  # it was too quick
    except DecodeAbortedError:
        pass
    timer.join()
    assert chain.memory.length(0) == 3
    assert np.array_equal(whole.decode(batch_of(whole, {0: [4]})), chain.decode(batch_of(chain, {0: [4]})))


@pytest.mark.parametrize("activations", ["f16", "q8_0"])
def test_rounded_activations(six_layers, make_whole, activations):
    stages = Stages(six_layers, activations=activations)
    whole = make_whole()
    try:
        for engine in (whole, stages.pipeline):
            engine.memory.allocate()
        text = {0: list(range(50))}
        a = whole.decode(batch_of(whole, text)).copy()
        b = stages.pipeline.decode(batch_of(stages.pipeline, text)).copy()
        assert not np.array_equal(a, b)
        assert np.corrcoef(a.ravel(), b.ravel())[0, 1] > 0.99
    finally:
        stages.pipeline.close()


def test_closing_ends_the_processes(six_layers):
    pipeline = open_stages(six_layers, 2, **SETTINGS)
    pids = [s.pid for s in pipeline.chain.status()]
    pipeline.close()
    pipeline.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_what_keeps_a_stage_from_starting_is_said(six_layers, tmp_path):
    bad = LocalStages(six_layers, CUTS, context_params=SETTINGS | {"n_seq_max": 0})
    with pytest.raises(Exception, match="n_seq_max"):
        RemoteChain(bad)
    assert not bad.pids
    from llamaherd.files.synthesize import synthesize

    with pytest.raises(UnsupportedFileError, match="encoder"):
        open_stages(synthesize(tmp_path / "t5.gguf", "t5"), 2)


def test_a_stage_that_cannot_be_replaced_fails_requests_and_the_next_call_tries_again(six_layers, make_whole):
    stages = Stages(six_layers, kv_unified=False)
    chain, whole = stages.pipeline, make_whole(kv_unified=False)
    try:
        chain.memory.allocate()
        chain.decode(batch_of(chain, {0: [1, 2, 3]}))
        path, stages.deployment.path = stages.deployment.path, "/no/such/model.gguf"
        os.kill(stages.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerStartError, match="no such"):
            chain.decode(batch_of(chain, {0: [4]}))
        assert chain.memory.length(0) == 0
        stages.deployment.path = path
        whole.memory.allocate()
        text = {0: [1, 2, 3, 4]}
        assert np.array_equal(whole.decode(batch_of(whole, text)), chain.decode(batch_of(chain, text)))
    finally:
        chain.close()


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
def test_a_replacement_that_is_lost_while_it_loads_is_replaced_too(
    six_layers, make_whole, monkeypatch, sig: signal.Signals
) -> None:
    monkeypatch.setattr("llamaherd.shard.local._FROZEN", 1.0)
    stages = Stages(six_layers, kv_unified=False)
    chain, whole = stages.pipeline, make_whole(kv_unified=False)
    victims: list[int] = []

    def strike() -> None:
        """The next two processes of that stage, before they have loaded anything."""
        while len(victims) < 2:
            pid = stages.deployment.pids[1]
            if pid not in (first, *victims):
                os.kill(pid, sig)
                victims.append(pid)

    try:
        for engine in (whole, chain):
            engine.memory.allocate()
            engine.decode(batch_of(engine, {0: [1, 2, 3]}))
        first = stages.pids[1]
        striker = threading.Thread(target=strike)
        striker.start()
        os.kill(first, signal.SIGKILL)
        last = {0: [4]}
        assert np.array_equal(whole.decode(batch_of(whole, last)), chain.decode(batch_of(chain, last)))
        striker.join(1)
        assert len(victims) == 2
        assert not any(psutil.pid_exists(pid) for pid in victims)
    finally:
        chain.close()


# ------------------------------------------------------------------------------------ strangers


@contextlib.contextmanager
def pushed(address: str, server: bytes, keys: wire.Keys | None, data: list[bytes]) -> Iterator[None]:
    """Three copies of a message on their way to a socket."""
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    if keys is not None:
        keys.call(socket, server)
    socket.connect(address)
    for _ in range(3):
        socket.send_multipart(data)
    try:
        yield
    finally:
        context.destroy(0)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def step(chain: RemoteChain, **changes: object) -> list[bytes]:
    header = wire.Header(
        epoch=chain._epoch, number=chain._sent, operations=[("allocate", 7, -1, 0)],
        positions=b"", sequences=b"", outputs=b"", form="none",
    )  # fmt: skip
    return [msgspec.msgpack.encode(msgspec.structs.replace(header, **changes)), b""]


def refused(chain: RemoteChain) -> list[int]:
    return [s.refused for s in chain.status()]


def test_strangers_are_not_let_in(stages, make_whole):
    endpoint = stages.chain._peers[1].endpoint
    before = refused(stages.chain)
    for keys in (wire.Keys.make(), None):  # a key that is not on the list, and none
        with pushed(endpoint.data, endpoint.key, keys, step(stages.chain)):
            time.sleep(1.5)  # two pings
    assert refused(stages.chain) == before  # it has not even seen them
    assert all(equal(conversation(make_whole(kv_unified=False)), conversation(stages.pipeline)))


@pytest.mark.parametrize("changes", [{"number": 0}, {"number": 10**6}, {"epoch": 0}, {"epoch": 10**6}, None])
def test_messages_that_do_not_continue_are_refused(stages, make_whole, changes):
    """Even from somebody with the right key: replayed, from the future, or no message at all."""
    before = refused(stages.chain)[0]
    stages.pipeline.memory.allocate()
    stages.pipeline.decode(batch_of(stages.pipeline, {0: [1]}))
    data = [b"\xc1nonsense"] if changes is None else step(stages.chain, **changes)
    endpoint = stages.chain._peers[0].endpoint
    with pushed(endpoint.data, endpoint.key, stages.deployment.keys, data):
        until(lambda: refused(stages.chain)[0] == before + 3)
    stages.pipeline.memory.clear()
    assert all(equal(conversation(make_whole(kv_unified=False)), conversation(stages.pipeline)))


def test_a_result_from_elsewhere_is_not_taken(stages, make_whole):
    address, key = wire.address_of(stages.chain._results), stages.deployment.keys.public
    with pushed(address, key, wire.Keys.make(), step(stages.chain, number=stages.chain._received)):
        time.sleep(0.5)
        assert all(equal(conversation(make_whole(kv_unified=False)), conversation(stages.pipeline)))


def test_operations_that_do_not_fit_are_noticed(stages, make_whole):
    """A stage that is not where the head believes it to be starts again from what the head knows."""
    whole, chain = make_whole(kv_unified=False), stages.pipeline
    for engine in (whole, chain):
        engine.memory.allocate()
        engine.decode(batch_of(engine, {0: [1, 2, 3]}))
    recoveries = chain.recoveries
    with chain._lock:
        chain.chain.send(Work((Operation("release", 0),), None))  # behind its back
        assert chain.chain.receive().error is None
    assert np.array_equal(whole.decode(batch_of(whole, {0: [4]})), chain.decode(batch_of(chain, {0: [4]})))
    assert chain.recoveries == recoveries + 1


def test_errors_name_the_stage():
    error = StageLostError(2, "it was killed")
    assert (error.stage, error.cause) == (2, "it was killed")
    assert "stage 2" in str(error)


def test_a_head_that_stood_still_does_not_blame_its_stages(stages, monkeypatch):
    """As after a laptop's sleep: nobody has answered for long, as nobody was asked."""
    chain = stages.chain
    monkeypatch.setattr(chain, "_frozen_after", 2.5)
    with chain._lock:  # the watcher stands still
        time.sleep(4)
        assert chain._lost() == {}
    for _ in range(40):
        assert chain._lost() == {}
        time.sleep(0.01)


def test_cancelling_does_not_disturb_a_recovery(stages, make_whole):
    whole, chain = make_whole(kv_unified=False), stages.pipeline
    for engine in (whole, chain):
        engine.memory.allocate()
        for i in range(40):
            engine.decode(batch_of(engine, {0: [i]}))
    os.kill(stages.pids[1], signal.SIGKILL)
    stop = threading.Event()

    def cancel() -> None:
        while not stop.is_set():
            if chain._recovering:
                chain.abort()
            time.sleep(0.001)

    thread = threading.Thread(target=cancel)
    thread.start()
    try:
        text = {0: [7]}
        assert np.array_equal(whole.decode(batch_of(whole, text)), chain.decode(batch_of(chain, text)))
    finally:
        stop.set()
        thread.join()
