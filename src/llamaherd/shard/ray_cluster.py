"""Stages on the machines of a Ray cluster.

Ray places the stages, tells of lost machines and carries slices; hidden states travel over the sockets of
`link`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec
import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .. import files
from ..errors import CapacityError, LlamaherdError, WorkerStartError
from ..wire_errors import pack_error, unpack_error
from . import wire
from .costs import costs_of_file
from .plan import Plan, plan
from .process import Started
from .ray_nodes import nodes_of
from .ray_processes import RESOURCE
from .server import StageServer
from .slices import SliceStore, content_hash
from .stage import Stage

__all__ = ["RayStages"]

log = logging.getLogger(__name__)

_MIB = 1 << 20
_PIECE = 16 << 20
_PLACE = 60.0  # seconds that an actor may take to be placed and to import
_REPLACE = 15.0  # seconds that replacing a stage is tried for
_LOAD = 600.0  # seconds that a stage may take to load


class _PlacingError(WorkerStartError):
    """A machine was lost while a stage started on it."""


class _StageActor:
    """A stage in a process that Ray has started."""

    def __init__(self) -> None:
        self._server: StageServer | None = None
        self._done = threading.Event()

    def address(self) -> tuple[str, int]:
        """The machine's IP address, and the process."""
        return str(ray.util.get_node_ip_address()), os.getpid()

    def begin_slice(self, path: str, identity: str, start: int, end: int, folder: str) -> int:
        """Bytes of the slice that are here; -1: it is here whole, or could be cut from the model's file."""
        store = SliceStore(folder or None)
        target = store.place(identity, start, end)
        if target.exists():
            return -1
        with contextlib.suppress(LlamaherdError, OSError):
            if Path(path).is_file() and store.identity(path) == identity:
                store.slice(path, start, end)
                return -1
        partial = _partial(target)
        return partial.stat().st_size if partial.exists() else 0

    def add_slice(self, identity: str, start: int, end: int, folder: str, offset: int, piece: bytes) -> int:
        """Put a piece behind what is here; bytes that are here then."""
        store = SliceStore(folder or None)
        store.make_folder()
        with open(_partial(store.place(identity, start, end)), "ab") as file:
            if file.tell() == offset:
                file.write(piece)
            return file.tell()

    def end_slice(self, identity: str, start: int, end: int, folder: str, sha256: str) -> bool:
        """Take the slice that has come; False, and it is gone, if it is not what was sent."""
        target = SliceStore(folder or None).place(identity, start, end)
        partial = _partial(target)
        if content_hash(partial) != sha256:
            partial.unlink()
            return False
        os.replace(partial, target)
        return True

    def check_slice(self, identity: str, start: int, end: int, folder: str) -> str:
        """The content hash of the slice that is here."""
        store = SliceStore(folder or None)
        return store.content_hash(store.place(identity, start, end))

    def serve(self, data: bytes, slice_path: tuple[str, int, int]) -> bytes:
        """Load the stage and serve it; what Started says."""
        config = msgspec.msgpack.decode(data, type=wire.StageConfig)
        try:
            path = SliceStore(config.slices or None).place(*slice_path)
            stage = Stage.load(path, model_params=config.model_params, **config.context_params)
            self._server = StageServer(stage, config)
        except LlamaherdError as error:
            return msgspec.msgpack.encode(Started(error=pack_error(error)))
        threading.Thread(target=self._serve, args=(self._server,), daemon=True).start()
        return msgspec.msgpack.encode(Started(self._server.endpoint))

    def _serve(self, server: StageServer) -> None:
        try:
            server.run()
        finally:
            self._done.set()

    def wait(self) -> None:
        """Return when the stage has ended."""
        self._done.wait()


def _partial(target: Path) -> Path:
    return target.with_suffix(".arriving")


@dataclass
class RayStages:
    """A deployment of stages on the machines of a Ray cluster; connect() comes first.

    Attributes:
        path: the whole model, here. A machine that has the same file at the same path cuts its slice from
            there; to others it is sent once, checked and kept.
        model_params, context_params: llama.cpp's own parameters, the same for all stages.
        activations: how hidden states travel: "f32" (exact), "f16" or "q8_0".
        slices: folder of the slice store on every machine; the default one if empty.
        few_machines: take as few as there must be, and leave the others to other pipelines; else as many as
            make it faster.
        plan: which machine holds what.
    """

    path: str | PathLike[str]
    model_params: dict[str, Any] = field(default_factory=dict)
    context_params: dict[str, Any] = field(default_factory=dict)
    activations: str = "f32"
    slices: str = ""
    few_machines: bool = False
    plan: Plan = field(init=False)

    def __post_init__(self) -> None:
        self.keys = wire.Keys.make()
        self.host = str(ray.util.get_node_ip_address())
        self._store = SliceStore()
        with files.open(self.path) as model:
            self._costs = costs_of_file(model)
        self._actors: dict[int, Any] = {}
        self._ends: dict[int, Any] = {}
        self.plan = self._plan()
        self._places = {i: share.node.name for i, share in enumerate(self.plan.shares)}
        # as many as there can be stages under any plan, since each is told whom it may let in
        self._stage_keys = [wire.Keys.make() for _ in self._costs.layers]
        self._identity = self._store.identity(self.path)

    def _plan(self, own: Mapping[str, int] | None = None) -> Plan:
        """Over the machines that there are; ``own`` bytes of each are ours already. Raises CapacityError."""
        nodes = nodes_of(latency=True)
        if not nodes:
            raise CapacityError("no machine of the cluster gives memory; join some with --memory", 0)
        planned = [n.as_planned((own or {}).get(n.id, 0)) for n in nodes]
        sizes = {
            "n_ctx": int(self.context_params.get("n_ctx", 4096)),
            "n_ubatch": int(self.context_params.get("n_ubatch", 512)),
        }
        if self.few_machines:
            roomy = sorted(planned, key=lambda node: -node.memory)
            for count in range(1, len(planned)):
                with contextlib.suppress(CapacityError):
                    return plan(self._costs, [n for n in planned if n in roomy[:count]], **sizes)
        return plan(self._costs, planned, **sizes)

    @property
    def cuts(self) -> list[int]:
        """Of the present plan."""
        return self.plan.cuts

    @property
    def n_stages(self) -> int:
        """Of the present plan."""
        return len(self.plan.shares)

    @property
    def admitted(self) -> list[bytes]:
        """Public keys of all stages that there may be."""
        return [keys.public for keys in self._stage_keys]

    @property
    def places(self) -> list[str]:
        """The id of each stage's machine."""
        return [self._places[i] for i in range(len(self.plan.shares))]

    def start(self) -> list[wire.Endpoint]:
        """Place and load all stages. Raises WorkerStartError, and what loading one raises."""
        started = self._start({i: self._places[i] for i in range(len(self.plan.shares))})
        return [started[i] for i in sorted(started)]

    def _start(self, places: Mapping[int, str]) -> dict[int, wire.Endpoint]:
        for index, node in places.items():
            self._actors[index] = self._actor(index, node)
        endpoints = {}
        loading = {}
        for index in places:
            actor = self._actors[index]
            host, _ = self._get(actor.address.remote(), index, _PLACE)
            self._bring_slice(index, actor)
            share = self.plan.shares[index]
            config = wire.StageConfig(
                index=index, path=str(self.path), start=share.start, end=share.end, slices=self.slices,
                model_params=self.model_params, context_params=self.context_params, host=host,
                keys=self._stage_keys[index],
                admitted=[self.keys.public, *self.admitted],
                activations=self.activations,
            )  # fmt: skip
            where = (self._identity, share.start, share.end)
            loading[index] = actor.serve.remote(msgspec.msgpack.encode(config), where)
        for index, reference in loading.items():
            started = msgspec.msgpack.decode(self._get(reference, index, _LOAD), type=Started)
            if started.error is not None:
                raise unpack_error(started.error)
            assert started.endpoint is not None
            endpoints[index] = started.endpoint
            self._ends[index] = self._actors[index].wait.remote()
        return endpoints

    def _actor(self, index: int, node: str) -> Any:
        need = self.plan.shares[index].reserved // _MIB
        options: dict[str, Any] = {
            "num_cpus": 0,
            "resources": {RESOURCE: need},
            "max_restarts": 0,  # an empty stage must not come back unseen
            "max_concurrency": 4,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True),
        }
        return ray.remote(_StageActor).options(**options).remote()

    def _get(self, reference: Any, index: int, seconds: float) -> Any:
        try:
            return ray.get(reference, timeout=seconds)
        except ray.exceptions.GetTimeoutError as error:
            cause = f"no machine with room has taken it within {seconds:.0f} s"
            raise WorkerStartError(f"stage {index} did not start: {cause}", cause) from error
        except ray.exceptions.RayError as error:
            cause = str(error).strip().splitlines()[0]
            raise _PlacingError(f"stage {index} did not start: {cause}", cause) from error

    def _bring_slice(self, index: int, actor: Any) -> None:
        """Have a stage's machine hold its slice, and check that it is the one."""
        share = self.plan.shares[index]
        where = (self._identity, share.start, share.end, self.slices)
        here = self._get(actor.begin_slice.remote(str(Path(self.path).absolute()), *where), index, _LOAD)
        source, _ = self._store.slice(self.path, share.start, share.end)
        sha256 = self._store.content_hash(source)
        for _ in range(2):
            if here >= 0:
                for piece in _pieces(source, here):
                    here = self._get(actor.add_slice.remote(*where, here, piece), index, _LOAD)
                if not self._get(actor.end_slice.remote(*where, sha256), index, _LOAD):
                    here = 0
                    continue
            if self._get(actor.check_slice.remote(*where), index, _LOAD) == sha256:
                return
            raise WorkerStartError(
                f"stage {index}'s machine holds another slice under this one's name; remove it from its "
                "slice folder"
            )
        raise WorkerStartError(f"stage {index}'s slice arrived damaged, twice")

    def lost(self) -> dict[int, str]:
        """Stages whose process or machine has gone, or that were not started yet."""
        gone = {}
        for index in range(self.n_stages):
            end = self._ends.get(index)
            if end is None:
                gone[index] = "it is not placed yet"
            elif ray.wait([end], timeout=0)[0]:
                gone[index] = "its process or machine has gone"
        return gone

    def replan(self) -> bool:
        """Plan anew, and end the stages that move or change. Raises CapacityError: all is as it was."""
        own: dict[str, int] = {}
        for index in self._actors:
            place = self._places[index]
            own[place] = own.get(place, 0) + self.plan.shares[index].reserved
        found = self._plan(own)
        before = [(s.start, s.end, self._places[i]) for i, s in enumerate(self.plan.shares)]
        after = [(s.start, s.end, s.node.name) for s in found.shares]
        if before == after:
            return False
        for index, stage in enumerate(before):
            if after[index : index + 1] != [stage]:
                self._end(index)
        self.plan = found
        self._places = {i: share.node.name for i, share in enumerate(found.shares)}
        self._await_room()
        return True

    def _await_room(self) -> None:
        """Until the machines have back what the stages that were ended held: Ray takes a moment."""
        needs: dict[str, int] = {}
        for index in self.lost():
            place = self._places[index]
            needs[place] = needs.get(place, 0) + self.plan.shares[index].reserved
        deadline = time.monotonic() + _REPLACE
        while time.monotonic() < deadline:
            free = {node.id: node.free for node in nodes_of()}
            if all(free.get(place, 0) >= need for place, need in needs.items()):
                return
            time.sleep(0.1)

    def replace(self, stages: Mapping[int, str]) -> dict[int, wire.Endpoint]:
        """End these and place others, on machines that have room."""
        for index, cause in stages.items():
            log.warning("stage %d is replaced: %s", index, cause)
            self._end(index)
        deadline = time.monotonic() + _REPLACE
        while True:  # Ray takes a moment to know that a machine is dead, and to give memory back
            try:
                return self._start(self._with_room(stages))
            except (CapacityError, _PlacingError) as error:
                for index in stages:
                    self._end(index)
                if time.monotonic() > deadline:
                    raise WorkerStartError(str(error), str(error)) from error
                time.sleep(0.2)

    def _with_room(self, stages: Mapping[int, str]) -> dict[int, str]:
        free = {n.id: n.free for n in nodes_of()}
        places = {}
        for index in stages:
            need = self.plan.shares[index].total
            old = self._places[index]
            room = [n for n in (old, *free) if free.get(n, 0) >= need]
            if not room:
                raise CapacityError(
                    f"stage {index} needs {need / _MIB:.0f} MiB, and no machine of the cluster has that much "
                    f"room (the most is {max(free.values(), default=0) / _MIB:.0f} MiB); join another",
                    max(free.values(), default=0),
                )
            places[index] = self._places[index] = room[0]
            free[room[0]] -= need
        return places

    def _end(self, index: int) -> None:
        self._ends.pop(index, None)
        actor = self._actors.pop(index, None)
        if actor is not None:
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(actor)

    def close(self) -> None:
        """End all stages."""
        for index in list(self._actors):
            self._end(index)


def _pieces(path: Path, offset: int) -> Iterator[bytes]:
    with open(path, "rb") as file:
        file.seek(offset)
        while piece := file.read(_PIECE):
            yield piece
