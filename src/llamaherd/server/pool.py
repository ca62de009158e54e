"""The models that a server offers, each in a worker of its own, loaded on first use."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..chat import ChatTemplate
from ..errors import LlamaherdError, ShuttingDownError, UnknownModelError
from ..replicas.client import ReplicasClient
from ..replicas.fleet import Fleet
from ..replicas.opening import open_fleet
from ..worker.client import WorkerClient
from ..worker.supervisor import Supervisor
from ..worker.wire import ModelInfo, WorkerConfig
from .settings import ServerSettings

__all__ = ["Pool", "Served"]

log = logging.getLogger(__name__)


@dataclass
class Served:
    """A model that is loaded.

    Attributes:
        used: when a request last asked for it.
    """

    name: str
    supervisor: Supervisor | Fleet
    info: ModelInfo
    created: int = field(default_factory=lambda: int(time.time()))
    used: float = field(default_factory=time.monotonic)
    _template: ChatTemplate | None = None
    _tool_template: ChatTemplate | None = None

    @property
    def client(self) -> WorkerClient | ReplicasClient:
        """Talks to its worker or replicas."""
        return self.supervisor.client

    def template(self, *, tools: bool = False) -> ChatTemplate:
        """Its chat template, or the one for tools if it has one. Raises ChatTemplateError."""
        if tools and self.info.tool_template:
            if self._tool_template is None:
                self._tool_template = self._compile(self.info.tool_template)
            return self._tool_template
        if self._template is None:
            self._template = self._compile(self.info.chat_template)
        return self._template

    def _compile(self, source: str | None) -> ChatTemplate:
        info = self.info
        texts = {"bos_token": info.bos, "eos_token": info.eos, "pad_token": info.pad}
        return ChatTemplate(source, info.control_texts, {k: v for k, v in texts.items() if v})

    @property
    def memory(self) -> int:
        """Bytes that it takes: its file, which is mapped, and its worker's own."""
        return self.info.size + self.supervisor.stats.memory


class Pool:
    """Loads, finds and unloads models. For one event loop.

    Args:
        settings: names and limits.
        on_load: called with each model's supervisor before it starts.
    """

    def __init__(
        self, settings: ServerSettings, on_load: Callable[[Supervisor | Fleet], None] | None = None
    ) -> None:
        self._settings = settings
        self._on_load = on_load
        self._loaded: dict[str, Served] = {}
        self._locks = {name: asyncio.Lock() for name in settings.models}
        self._making_room = asyncio.Lock()
        self.draining = False

    @property
    def names(self) -> list[str]:
        """All that may be asked for, the default first."""
        return list(self._settings.models)

    @property
    def loaded(self) -> list[Served]:
        """Those that are loaded."""
        return list(self._loaded.values())

    def find(self, name: str | None) -> str:
        """The name of the model meant: the default if none was named. Raises UnknownModelError."""
        if not name:
            return self.names[0]
        if name in self._settings.models:
            return name
        raise UnknownModelError(name, self.names)

    async def get(self, name: str | None = None) -> Served:
        """A model, loaded if it was not.

        Raises:
            UnknownModelError: no model of that name.
            ShuttingDownError: the server stops.
            LlamaherdError: it cannot be loaded.
        """
        if self.draining:
            raise ShuttingDownError
        found = self.find(name)
        served = self._loaded.get(found)
        if served is None:
            async with self._locks[found]:
                served = self._loaded.get(found)
                if served is None:
                    served = await self._load(found)
        served.used = time.monotonic()
        return served

    async def _load(self, name: str) -> Served:
        config = self._settings.models[name]
        async with self._making_room:
            await self._make_room(config)
        supervisor = await self._supervisor(name, config)
        if self._on_load is not None:
            self._on_load(supervisor)
        try:
            info = await supervisor.start()
        except BaseException:
            await supervisor.close()
            raise
        served = self._loaded[name] = Served(name, supervisor, info)
        return served

    async def _supervisor(self, name: str, config: WorkerConfig) -> Supervisor | Fleet:
        settings = self._settings
        if not config.replicas:
            return Supervisor(
                config,
                name=name,
                heartbeat_timeout=settings.heartbeat_timeout,
                step_timeout=settings.step_timeout,
                max_buffered_events=settings.max_buffered_events,
            )
        return await asyncio.to_thread(
            open_fleet, config, name=name, max_buffered_events=settings.max_buffered_events
        )

    async def _make_room(self, config: WorkerConfig) -> None:
        """Unload the least recently used idle models until the new one fits, as far as that is possible."""
        limit = self._settings.models_memory
        if not limit:
            return
        needed = _file_size(config)
        while self._loaded and sum(s.memory for s in self.loaded) + needed > limit:
            idle = [s for s in self.loaded if not s.client.open_requests]
            if not idle:
                log.warning("the models in use take more than models_memory (%d bytes)", limit)
                return
            oldest = min(idle, key=lambda s: s.used)
            log.info("unloading %s, the least recently used model", oldest.name)
            del self._loaded[oldest.name]
            await oldest.supervisor.close()

    @property
    def ready(self) -> bool:
        """Whether the default model's worker answers."""
        served = self._loaded.get(self.names[0])
        return served is not None and served.supervisor.ready and not self.draining

    async def drain(self, grace: float) -> None:
        """Refuse new requests, and wait until those that run have finished, or ``grace`` seconds."""
        self.draining = True
        deadline = time.monotonic() + grace
        while any(s.client.open_requests for s in self.loaded) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Stop all workers; idempotent."""
        self.draining = True
        loaded, self._loaded = self.loaded, {}
        results = await asyncio.gather(*(s.supervisor.close() for s in loaded), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, LlamaherdError):
                log.error("a worker did not stop well: %r", result)


def _file_size(config: WorkerConfig) -> int:
    try:
        return Path(config.model).stat().st_size
    except OSError:
        return 0
