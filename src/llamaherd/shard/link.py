"""The head's end of a chain of stages in other processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import zmq

from ..errors import StageLostError
from ..wire_errors import unpack_error
from . import wire
from .draws import pack_draws, unpack_picks
from .stage import StageFacts
from .work import Done, Work

__all__ = ["Deployment", "RemoteChain", "StageStatus"]

_PING_EVERY = 0.5  # seconds
_FROZEN = 8.0  # seconds without an answer
_START = 120.0  # seconds that a replaced stage may take to answer for the first time


class Deployment(Protocol):
    """Who starts the stages' processes, wherever they are."""

    @property
    def keys(self) -> wire.Keys:
        """The head's."""

    @property
    def host(self) -> str:
        """The head's address, as the last stage sees it."""

    @property
    def n_stages(self) -> int:
        """Stages of the present plan."""

    @property
    def admitted(self) -> Sequence[bytes]:
        """Public keys of all stages that there may be, under any plan."""

    def start(self) -> Sequence[wire.Endpoint]:
        """Start all stages, and wait until they are loaded. Raises what loading does, WorkerStartError."""

    def lost(self) -> Mapping[int, str]:
        """Stages whose process has ended, and how."""

    def replace(self, stages: Mapping[int, str]) -> Mapping[int, wire.Endpoint]:
        """End these and start others in their place. Raises WorkerStartError: there is no room for one."""

    def replan(self) -> bool:
        """Divide the model anew among the machines that there are, and end the stages that move.

        Whether any does: they are lost() then. Raises CapacityError: all is as it was.
        """

    def close(self) -> None:
        """End all processes; idempotent."""


@dataclass(frozen=True, slots=True)
class StageStatus:
    """A look at one stage.

    Attributes:
        facts, host, pid: what it holds; the address of its machine; its process.
        latency: seconds from a ping to its answer, the newest.
        seconds: that it has computed.
        used_cells: of its KV cache.
        refused: messages that it did not take.
    """

    facts: StageFacts
    host: str
    pid: int
    latency: float
    seconds: float
    used_cells: int
    refused: int


class _Peer:
    """A stage as the head knows it."""

    def __init__(self, endpoint: wire.Endpoint) -> None:
        self.endpoint = endpoint
        self.seen = time.monotonic()
        self.sent: dict[int, float] = {}
        self.latency = 0.0
        self.pong = wire.Pong(0)


class RemoteChain:
    """A chain of stages behind sockets; see `Chain`.

    Args:
        deployment: closed with the chain.
        frozen_after: seconds without a sign of life after which a stage is taken for lost.
    """

    def __init__(self, deployment: Deployment, *, frozen_after: float = _FROZEN) -> None:
        self._deployment = deployment
        self._frozen_after = frozen_after
        self._zmq = zmq.Context()
        self._lock = threading.Lock()  # of the peers and their control sockets
        self._closed = threading.Event()
        self._looked = time.monotonic()  # when the watcher last did
        self._epoch = 0
        self._sent = self._received = 0
        self._first: zmq.Socket[bytes] | None = None
        try:
            endpoints = deployment.start()
        except BaseException:
            deployment.close()
            self._zmq.term()
            raise
        self._authenticator = wire.admit_only(self._zmq, deployment.admitted)
        self._results: zmq.Socket[bytes] = self._zmq.socket(zmq.PULL)
        self._results.setsockopt(zmq.RCVHWM, 0)
        deployment.keys.serve(self._results)
        self._results.bind_to_random_port(f"tcp://{deployment.host}")
        self._peers: dict[int, _Peer] = {}
        self._controls: dict[int, zmq.Socket[bytes]] = {}
        self._meet(dict(enumerate(endpoints)))
        try:
            self._configure()
        except BaseException:
            self._shut()
            raise
        self._watcher = threading.Thread(target=self._watch, name="stages", daemon=True)
        self._watcher.start()

    @property
    def facts(self) -> tuple[StageFacts, ...]:
        """Of each stage."""
        return tuple(peer.endpoint.facts for peer in self._in_order())

    @property
    def depth(self) -> int:
        """As many steps as there are stages keep all of them at work."""
        return len(self._peers)

    def status(self) -> tuple[StageStatus, ...]:
        """A look at each stage; from any thread."""
        return tuple(
            StageStatus(
                p.endpoint.facts,
                p.endpoint.data.removeprefix("tcp://").rpartition(":")[0],
                p.endpoint.pid,
                p.latency,
                p.pong.seconds,
                p.pong.used_cells,
                p.pong.refused,
            )
            for p in self._in_order()
        )

    def _in_order(self) -> list[_Peer]:
        return [peer for _, peer in sorted(self._peers.items())]

    # --------------------------------------------------------------------------------------- steps

    def send(self, work: Work) -> None:
        """Send a step to the first stage; it does not wait."""
        batch = work.batch
        nothing = np.empty(0, np.int32)
        form, width, data = "none", 1, b""
        if batch is not None and batch.tokens is not None:
            form, data = "tokens", np.ascontiguousarray(batch.tokens, np.int32).tobytes()
        elif batch is not None and batch.embeddings is not None:
            form, width = "f32", batch.embeddings.shape[1]
            data = wire.encode_array(batch.embeddings, form)
        header = wire.Header(
            epoch=self._epoch,
            number=self._sent,
            operations=[(o.kind, o.sequence, o.source, o.length) for o in work.operations],
            positions=np.ascontiguousarray(nothing if batch is None else batch.positions, np.int32).tobytes(),
            sequences=np.ascontiguousarray(nothing if batch is None else batch.sequences, np.int32).tobytes(),
            outputs=np.ascontiguousarray(nothing if batch is None else batch.outputs, np.bool_).tobytes(),
            form=form,
            width=width,
            draws=pack_draws(None if batch is None else batch.draws),
        )
        assert self._first is not None
        self._first.send_multipart([msgspec.msgpack.encode(header), data])
        self._sent += 1

    def receive(self) -> Done:
        """The next step's result, once the last stage has sent it."""
        while True:
            if self._results.poll(50):
                header, data = self._result(self._results.recv_multipart())
                if header is not None:
                    break
            else:
                self._raise_if_lost()
        self._received += 1
        error = None if header.error is None else unpack_error(header.error)
        if error is not None:
            return Done(None, error, tuple(header.seconds))
        logits = None
        if header.form == "logits":
            n = len(data) // (4 * header.width)
            logits = wire.decode_array(data, "logits", n, header.width).copy()  # the caller may change them
        rows = unpack_picks(header.picks, logits) if header.picks else logits
        return Done(rows, None, tuple(header.seconds))

    def _result(self, frames: list[bytes]) -> tuple[wire.Header | None, bytes]:
        """A result that is awaited, or None."""
        try:
            header = msgspec.msgpack.decode(frames[0], type=wire.Header)
            data = frames[1]
        except (msgspec.MsgspecError, IndexError):
            return None, b""
        if header.epoch != self._epoch or header.number != self._received:
            return None, b""  # of before a recovery
        return header, data

    def abort(self) -> None:
        """Have the stages drop what is under way; from any thread."""
        if not self._lock.acquire(timeout=0.5):
            return  # a new epoch begins: there is nothing to drop
        try:
            if not self._closed.is_set():
                self._tell(self._peers, wire.Abort(self._epoch, self._sent - 1))
        finally:
            self._lock.release()

    # -------------------------------------------------------------------------------------- losses

    def _raise_if_lost(self) -> None:
        for stage, cause in self._lost().items():
            raise StageLostError(stage, cause)

    def _lost(self) -> dict[int, str]:
        lost = dict(self._deployment.lost())
        for stage, peer in self._peers.items():
            silent = self._looked - peer.seen
            if stage not in lost and silent > self._frozen_after:
                lost[stage] = f"it has not answered for {silent:.1f} s"
        return lost

    def restore(self) -> None:
        """Replace the stages that are lost, and begin a new epoch with all of them. Raises WorkerError."""
        lost = self._lost()
        if lost:
            self._meet(self._deployment.replace(lost))
        self._configure()

    def rebalance(self) -> bool:
        """Divide the layers anew among the machines that there are now; whether that changed anything.

        If so, the stages that have moved are lost: restore() comes next. Nothing may be under way.

        Raises CapacityError, WorkerError: nothing was changed.
        """
        if not self._deployment.replan():
            return False
        with self._lock:
            for stage in self._deployment.lost():
                self._forget(stage)
            for stage in [s for s in self._peers if s >= self._deployment.n_stages]:
                self._forget(stage)
        return True

    def _forget(self, stage: int) -> None:
        if stage in self._peers:
            del self._peers[stage]
            self._controls.pop(stage).close(0)

    def _meet(self, endpoints: Mapping[int, wire.Endpoint]) -> None:
        """Take in stages that have started."""
        with self._lock:
            for stage, endpoint in endpoints.items():
                self._forget(stage)
                self._peers[stage] = _Peer(endpoint)
                self._controls[stage] = self._control(endpoint)
        if 0 in endpoints:
            if self._first is not None:
                self._first.close(0)
            self._first = self._push(endpoints[0])

    def _configure(self) -> None:
        """Have every stage begin a new epoch. Raises StageLostError: one does not answer."""
        self._epoch += 1
        self._sent = self._received = 0
        peers = self._in_order()
        addresses = [p.endpoint.data for p in peers[1:]] + [wire.address_of(self._results)]
        keys = [p.endpoint.key for p in peers[1:]] + [self._deployment.keys.public]
        with self._lock:
            for stage, (to, key) in enumerate(zip(addresses, keys, strict=True)):
                self._tell([stage], wire.Configure(self._epoch, to, key))
            waiting = set(self._peers)
            deadline = time.monotonic() + self._frozen_after
            while waiting:
                waiting -= {s for s, pong in self._hear(0.1) if pong.number == self._epoch}
                if waiting and (gone := self._deployment.lost()):
                    stage = min(gone)
                    raise StageLostError(stage, gone[stage])
                if waiting and time.monotonic() > deadline:
                    stage = min(waiting)
                    self._peers[stage].seen = -self._frozen_after  # so that it is replaced
                    raise StageLostError(stage, f"it has not answered for {self._frozen_after:.1f} s")

    # ------------------------------------------------------------------------------------- control

    def _push(self, endpoint: wire.Endpoint) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._zmq.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        self._deployment.keys.call(socket, endpoint.key)
        socket.connect(endpoint.data)
        return socket

    def _control(self, endpoint: wire.Endpoint) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._zmq.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 200)
        self._deployment.keys.call(socket, endpoint.key)
        socket.connect(endpoint.control)
        return socket

    def _tell(self, stages: Iterable[int], command: wire.Command) -> None:
        for stage in stages:
            try:
                self._controls[stage].send(msgspec.msgpack.encode(command), zmq.NOBLOCK)
            except zmq.Again:
                continue  # it does not read: the watcher will see that

    def _hear(self, seconds: float) -> list[tuple[int, wire.Pong]]:
        """Answers that come within some time; the caller holds the lock."""
        poller = zmq.Poller()
        for socket in self._controls.values():
            poller.register(socket, zmq.POLLIN)
        ready = dict(poller.poll(int(seconds * 1000)))
        heard = []
        for stage, socket in self._controls.items():
            if socket in ready:
                pong = msgspec.msgpack.decode(socket.recv(), type=wire.Pong)
                peer = self._peers[stage]
                peer.seen, peer.pong = time.monotonic(), pong
                if pong.number in peer.sent:
                    peer.latency = peer.seen - peer.sent.pop(pong.number)
                heard.append((stage, pong))
        return heard

    def _watch(self) -> None:
        """Ask every stage for a sign of life, again and again."""
        number = 1 << 40  # apart from the epochs, which are answered likewise
        next_ping = 0.0
        while not self._closed.wait(0.02):
            with self._lock:
                if self._closed.is_set():
                    return
                now = time.monotonic()
                if now - self._looked > 2:  # it was this process that stood still
                    for peer in self._peers.values():
                        peer.seen += now - self._looked
                self._looked = now
                if now >= next_ping:
                    number, next_ping = number + 1, now + _PING_EVERY
                    for stage, peer in self._peers.items():
                        peer.sent = {number: now}
                        self._tell([stage], wire.Ping(number))
                    self._hear(0.01)  # most answer at once, which tells how long the way is
                self._hear(0)

    def close(self) -> None:
        """End the stages; idempotent."""
        if not self._closed.is_set():
            with self._lock:
                self._closed.set()
                self._tell(self._peers, wire.Stop())
            self._watcher.join()
            self._shut()

    def _shut(self) -> None:
        self._closed.set()
        self._deployment.close()
        self._authenticator.stop()
        self._zmq.destroy(0)
