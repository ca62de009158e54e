"""Replicas on the machines of a Ray cluster, by Ray Serve: it places them, and others when some are lost.

Each replica is an application of its own with one Serve replica, so that `Affinity` can address it. Serve's
HTTP proxies are not used: the requests come over Serve's handles.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import ray
import ray.exceptions
from ray import serve
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .. import files
from ..errors import CapacityError, FileError, InvalidParameterError, LlamaherdError, WorkerStartError
from ..shard import ray_nodes
from ..shard.costs import costs_of_file
from ..shard.plan import Node, plan
from ..shard.ray_processes import RESOURCE
from ..shard.slices import SliceStore, content_hash
from ..types import Failed, Finished, Usage
from ..worker import wire
from ..worker.client import WorkerClient
from ..worker.supervisor import Supervisor
from .client import ReplicaLostError
from .fleet import ReplicaStatus

__all__ = ["ServeLauncher"]

log = logging.getLogger(__name__)

_MIB = 1 << 20
_PIECE = 16 << 20
_ORPHANED = 60.0  # seconds without a look from the server after which a replica ends itself
_LOST = (ray.exceptions.RayError, serve.exceptions.RayServeException)


class _ModelSource:
    """The model's file on the server's machine, for replicas whose machine has not the same."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._sha256 = SliceStore().content_hash(path)

    def sha256(self) -> str:
        """Of the file."""
        return self._sha256

    def piece(self, offset: int) -> bytes:
        """Bytes from there on; empty at the end."""
        with open(self._path, "rb") as file:
            file.seek(offset)
            return file.read(_PIECE)


def _fetch(path: str, source: Any) -> str:
    """The model's file on this machine: the one at the same path, or a kept copy. Raises FileError."""
    store = SliceStore()
    sha256 = ray.get(source.sha256.remote())
    with contextlib.suppress(OSError):
        if Path(path).is_file() and store.content_hash(path) == sha256:
            return path
    target = store.folder / f"{sha256[:32]}.gguf"
    store.make_folder()
    with open(target.with_suffix(".arriving"), "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # two replicas of one machine
        if target.exists() and store.content_hash(target) == sha256:
            return str(target)
        for _ in range(2):
            while piece := ray.get(source.piece.remote(file.tell())):
                file.write(piece)
            file.flush()
            if content_hash(file.name) == sha256:
                os.replace(file.name, target)
                return str(target)
            file.truncate(0)
            file.seek(0)
    raise FileError(target, "arrived damaged, twice")


class _Engine:
    """What Serve runs: a supervisor with its worker."""

    def __init__(self, name: str, config: bytes, source: Any) -> None:
        self._name = name
        self._life = secrets.token_hex(8)
        self._host = str(ray.util.get_node_ip_address())
        self._looked = time.monotonic()
        self._config = msgspec.msgpack.decode(config, type=wire.WorkerConfig)
        self._source = source
        self._supervisor: Supervisor | None = None
        self._error: LlamaherdError | None = None
        self._starting = asyncio.get_running_loop().create_task(self._start())

    async def _start(self) -> None:
        try:
            path = await asyncio.to_thread(_fetch, self._config.model, self._source)
            config = msgspec.structs.replace(self._config, model=path)
            self._supervisor = Supervisor(config, name=self._name)
            await self._supervisor.start()
        except LlamaherdError as error:
            self._error = error
        except ray.exceptions.RayError as error:
            self._error = WorkerStartError(f"the model's file does not come: {error}", str(error))
        self._watch = asyncio.create_task(self._end_when_orphaned())

    async def _end_when_orphaned(self) -> None:
        """End this replica when its server is gone: Serve keeps what nobody deletes."""
        while time.monotonic() - self._looked < _ORPHANED:
            await asyncio.sleep(1)
        log.warning("nobody has asked for %s for %g s: it ends", self._name, _ORPHANED)
        await asyncio.to_thread(serve.delete, self._name, False)

    async def check_health(self) -> None:
        """Serve asks: a replica whose worker cannot be started is started elsewhere."""
        if self._starting.done() and self._supervisor is not None and self._supervisor.info is not None:
            self._supervisor.client.check()

    async def status(self) -> bytes:
        """A ReplicaStatus, once the worker has been started or not."""
        self._looked = time.monotonic()
        await asyncio.shield(self._starting)
        self._looked = time.monotonic()
        supervisor = self._supervisor
        if supervisor is None or self._error is not None:
            assert self._error is not None
            return msgspec.msgpack.encode(ReplicaStatus(False, error=wire.pack_error(self._error)))
        look = ReplicaStatus(
            supervisor.ready, supervisor.stats, supervisor.info, None, self._host, supervisor.pid or 0,
            supervisor.restarts, supervisor.last_death, self._life,
        )  # fmt: skip
        return msgspec.msgpack.encode(look)

    async def _client(self) -> WorkerClient:
        """The worker's, once it has been started. Raises what keeps it from that."""
        await asyncio.shield(self._starting)
        if self._supervisor is None:
            raise self._error or WorkerStartError("the worker has not started")
        return self._supervisor.client

    async def generate(self, data: bytes) -> AsyncGenerator[bytes, None]:
        """A request's Events."""
        submit = wire.decode_down(data)
        assert isinstance(submit, wire.Submit)
        try:
            client = await self._client()
            async with client.submit(wire.unpack_request(submit.request)) as stream:
                async for events in stream.batches():
                    yield wire.encode(_packed(events))
        except LlamaherdError as error:
            yield wire.encode(wire.Events(failed=[(0, wire.pack_error(error), Usage(0, 0))]))

    async def call(self, data: bytes) -> bytes:
        """The Reply to a Call."""
        call = wire.decode_down(data)
        assert isinstance(call, wire.Call)
        try:
            return wire.encode(await (await self._client()).call(call.call))
        except LlamaherdError as error:
            return wire.encode(wire.Reply(0, error=wire.pack_error(error)))

    async def __del__(self) -> None:
        if self._supervisor is not None:
            await self._supervisor.close()


def _packed(events: list[Any]) -> wire.Events:
    packed = wire.Events()
    for event in events:
        if isinstance(event, Finished):
            packed.finished.append((0, event))
        elif isinstance(event, Failed):
            packed.failed.append((0, wire.pack_error(event.error), event.usage))
        else:
            packed.tokens.append((0, event))
    return packed


class _ServeReplica:
    """A replica, from the server's side."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def generate(self, submit: bytes) -> AsyncGenerator[bytes, None]:
        response = self._streaming.generate.remote(submit)
        try:
            async for data in response:
                yield data
        except _LOST as error:
            raise ReplicaLostError(_cause(error)) from error
        finally:
            response.cancel()

    async def call(self, call: bytes) -> bytes:
        try:
            answer: bytes = await self._handle.call.remote(call)
        except _LOST as error:
            raise ReplicaLostError(_cause(error)) from error
        return answer

    async def status(self) -> bytes:
        try:
            answer: bytes = await self._handle.status.remote()
        except _LOST as error:
            raise ReplicaLostError(_cause(error)) from error
        return answer


def _take_back_signals() -> None:
    """Ray's own handler prints a stack for SIGTERM, before it calls the one that was there."""
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _cause(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


class ServeLauncher:
    """Places so many replicas of a model on a cluster's machines.

    A model that no machine has room for is cut by layers, each replica for itself.

    Args:
        config: of each replica's worker; ``cluster`` and ``replicas`` say where and how many.
        name: of the model.
    """

    def __init__(self, config: wire.WorkerConfig, name: str) -> None:
        self._config = config
        self._name = name
        self._apps: list[str] = []
        self._source: Any = None

    async def start(self) -> dict[str, _ServeReplica]:
        """Start them all, one after another where they are cut."""
        try:
            return await asyncio.to_thread(self._start)
        finally:
            _take_back_signals()

    async def close(self) -> None:
        """End them all."""
        await asyncio.to_thread(self._close)

    def _start(self) -> dict[str, _ServeReplica]:
        config = self._config
        ray_nodes.connect(config.cluster)
        need = self._need()
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._source = (
            ray.remote(_ModelSource)
            .options(num_cpus=0, scheduling_strategy=here, max_concurrency=4)
            .remote(os.path.abspath(config.model))
        )
        config = msgspec.structs.replace(
            config, model=os.path.abspath(config.model), replicas=0,
            cluster="" if need else config.cluster, few_machines=True,
        )  # fmt: skip
        packed = msgspec.msgpack.encode(config)
        label = f"{self._name}-{secrets.token_hex(4)}"
        self._apps = [f"{label}-{number}" for number in range(self._config.replicas)]
        deployment = serve.deployment(
            _Engine,
            num_replicas=1,
            max_ongoing_requests=1 << 20,  # the bound is the server's
            health_check_period_s=2,
            health_check_timeout_s=10,
            graceful_shutdown_wait_loop_s=0.5,
            graceful_shutdown_timeout_s=10,
            ray_actor_options={"num_cpus": 0, "resources": {RESOURCE: need // _MIB} if need else {}},
        )
        targets = [
            serve.RunTarget(deployment.bind(app, packed, self._source), name=app, route_prefix=None)
            for app in self._apps
        ]
        handles = []
        try:
            if need:
                handles = serve.run_many(targets)
            for target in targets[len(handles) :]:
                handles += serve.run_many([target])
                handles[-1].status.remote().result()  # the next one is planned with what is left
        except (*_LOST, RuntimeError) as error:
            self._close()
            cause = _cause(error)
            raise WorkerStartError(f"the replicas of {self._name} did not start: {cause}", cause) from error
        return {
            app.removeprefix(f"{self._name}-"): _ServeReplica(handle)
            for app, handle in zip(self._apps, handles, strict=True)
        }

    def _need(self) -> int:
        """Bytes that a replica takes on its machine; 0: it is cut over several. Raises CapacityError."""
        config = self._config
        with files.open(config.model) as model:
            costs = costs_of_file(model)
        n_ctx = config.params.get("n_ctx", 4096)
        if isinstance(n_ctx, bool) or not isinstance(n_ctx, int):
            raise InvalidParameterError("n_ctx", n_ctx, "a number of tokens")
        share = plan(costs, [Node("any", 1 << 62)], n_ctx=n_ctx).shares[0]
        nodes = ray_nodes.nodes_of()
        room = sum(node.free // share.reserved for node in nodes)
        if room >= config.replicas:
            return share.reserved
        if room == 0 and len(nodes) > 1:
            if config.loras:
                raise InvalidParameterError(
                    "lora",
                    config.loras[0].path,
                    "given where a machine has room for the whole model: adapters are not cut",
                )
            return 0
        raise CapacityError(
            f"{config.replicas} replicas of {self._name} need {share.reserved >> 20} MiB each with "
            f"n_ctx = {n_ctx}, and the cluster's machines have room for {room}; join more, or ask for fewer",
            room,
        )

    def _close(self) -> None:
        apps, self._apps = self._apps, []
        for app in apps:
            with contextlib.suppress(*_LOST, RuntimeError):
                serve.delete(app, _blocking=False)
        if self._source is not None:
            with contextlib.suppress(*_LOST):
                ray.kill(self._source)
            self._source = None
