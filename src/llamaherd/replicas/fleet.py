"""The replicas of one model, started, watched and ended together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Protocol

import msgspec

from ..errors import ClosedError, WorkerError, WorkerStartError
from ..worker import wire
from .client import Replica, ReplicaLostError, ReplicasClient

__all__ = ["Fleet", "Launcher", "ReplicaStatus", "WatchedReplica"]

log = logging.getLogger(__name__)

_LOOK_EVERY = 1.0  # seconds
_PATIENCE = 4.0  # seconds that a look may take
_DESPAIR = 60.0  # seconds without any replica after which requests fail


class ReplicaStatus(msgspec.Struct, frozen=True):
    """A look at a replica.

    Attributes:
        info: of its model; None if its worker has never started.
        error: why it could not start.
        host: address of its machine.
        pid: of the worker's process.
        restarts, last_death: of workers.
        life: another one after each start of the replica, which then has an empty cache.
    """

    ready: bool
    stats: wire.Stats = wire.Stats()
    info: wire.ModelInfo | None = None
    error: wire.WireError | None = None
    host: str = ""
    pid: int = 0
    restarts: int = 0
    last_death: str = ""
    life: str = ""


class WatchedReplica(Replica, Protocol):
    """A replica that says how it is."""

    async def status(self) -> bytes:
        """A ReplicaStatus. Raises ReplicaLostError."""
        ...


class Launcher(Protocol):
    """Places replicas on machines."""

    async def start(self) -> Mapping[str, WatchedReplica]:
        """All of them, by their names, loaded or with an error in their status. Raises LlamaherdError."""
        ...

    async def close(self) -> None:
        """End them all; idempotent."""
        ...


class Fleet:
    """What `Supervisor` is to one worker, to the replicas of a model. For one event loop.

    Args:
        config: of each replica's worker.
        launcher: places them.
        name: of the model, in logs.
        max_buffered_events: events that a request may hold unread.
    """

    def __init__(
        self,
        config: wire.WorkerConfig,
        launcher: Launcher,
        *,
        name: str = "model",
        max_buffered_events: int = 4096,
    ) -> None:
        self.config = config
        self.name = name
        self.info: wire.ModelInfo | None = None
        self._launcher = launcher
        self._max_buffered = max_buffered_events
        self._replicas: Mapping[str, WatchedReplica] = {}
        self._looks: dict[str, ReplicaStatus] = {}
        self._last_death = ""
        self._last_ready = time.monotonic()
        self._lost = 0  # replicas, and workers of lost replicas
        self._tasks: list[asyncio.Task[None]] = []
        self.client = self._client()

    def _client(self) -> ReplicasClient:
        scheduler = self.config.scheduler
        each = scheduler.max_queue + (scheduler.max_sequences or 16)
        return ReplicasClient(
            self._replicas,
            max_open=each * max(len(self._replicas), 1),
            max_buffered_events=self._max_buffered,
        )

    async def start(self) -> wire.ModelInfo:
        """Place all replicas and wait until they take requests.

        Raises:
            LlamaherdError: what kept one from starting (no such file, no room, ...).
        """
        self._replicas = await self._launcher.start()
        self.client = self._client()
        for name, replica in self._replicas.items():
            look = await self._look(name, replica, None)
            if look is None or look.info is None:
                if look is not None and look.error is not None:
                    raise wire.unpack_error(look.error)
                raise WorkerStartError(f"replica {name} of {self.name} did not start")
            self.info = look.info
            self._tasks.append(asyncio.create_task(self._watch(name, replica)))
        assert self.info is not None
        self._last_ready = time.monotonic()
        return self.info

    async def close(self) -> None:
        """End all replicas; what is open ends with ClosedError. Idempotent."""
        self.client.refuse(ClosedError("server"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._launcher.close()

    # ------------------------------------------------------------------------------------------- looks

    async def _watch(self, name: str, replica: WatchedReplica) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY)
            await self._look(name, replica, _PATIENCE)

    async def _look(self, name: str, replica: WatchedReplica, patience: float | None) -> ReplicaStatus | None:
        try:
            data = await asyncio.wait_for(replica.status(), patience)
        except (ReplicaLostError, asyncio.TimeoutError) as error:
            before = self._looks.get(name)
            cause = str(error) or "it gives no sign of life"
            if before is not None and before.ready:
                log.error("replica %s of %s does not answer: %s", name, self.name, cause)
                self._looks[name] = msgspec.structs.replace(before, ready=False)
                self.client.set_ready(name, False)
            else:  # the second time
                self.client.give_up(name, cause)
            if time.monotonic() - self._last_ready > _DESPAIR:
                self.client.refuse(
                    WorkerError(f"no replica of {self.name} has answered for {_DESPAIR:g} s", cause)
                )
            return None
        look = msgspec.msgpack.decode(data, type=ReplicaStatus)
        before = self._looks.get(name)
        if before is not None and before.life != look.life:
            self.client.set_ready(name, False)  # what it had computed is gone
            self._lost += 1 + before.restarts
            self._last_death = f"replica {name} was lost with its process or machine ({before.host})"
            log.error("%s; it is back on %s", self._last_death, look.host)
        self._looks[name] = look
        self.client.set_ready(name, look.ready)
        if look.ready:
            self._last_ready = time.monotonic()
        elif time.monotonic() - self._last_ready > _DESPAIR:
            cause = look.last_death or "their workers are not ready"
            self.client.refuse(WorkerError(f"no replica of {self.name} was ready for {_DESPAIR:g} s", cause))
        return look

    @property
    def replicas(self) -> dict[str, ReplicaStatus]:
        """The latest look at each, by name."""
        return dict(self._looks)

    @property
    def ready(self) -> bool:
        """Whether a replica takes requests now."""
        return any(look.ready for look in self._looks.values())

    @property
    def restarts(self) -> int:
        """Deaths of workers, and losses of replicas."""
        return self._lost + sum(look.restarts for look in self._looks.values())

    @property
    def last_death(self) -> str:
        """How the last one ended."""
        deaths = [look.last_death for look in self._looks.values() if look.last_death]
        return self._last_death or (deaths[-1] if deaths else "")

    @property
    def stats(self) -> wire.Stats:
        """All replicas together: sums, but for the longest step."""
        return add_stats([look.stats for look in self._looks.values()])


def add_stats(parts: list[wire.Stats]) -> wire.Stats:
    """Sums; of steps in flight the longest, and of stages all."""
    sums = {
        field: sum(getattr(part, field) for part in parts)
        for field in wire.Stats.__struct_fields__
        if field not in ("step_seconds", "stages")
    }
    return wire.Stats(
        **sums,
        step_seconds=max((part.step_seconds for part in parts), default=0.0),
        stages=[stage for part in parts for stage in part.stages],
    )
