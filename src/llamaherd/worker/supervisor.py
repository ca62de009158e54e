"""Keeps a worker process alive: starts it, watches it, says how it died, starts another."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ClosedError, LlamaherdError, WorkerStartError
from ..processes import was_stopped
from . import wire
from .child import Child, oom_kills
from .client import Death, WorkerClient
from .link import Link

__all__ = ["Supervisor"]

log = logging.getLogger(__name__)

_BACKOFF = (0.0, 0.0, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before a start, by the number of deaths since anything was got done."""


class Supervisor:
    """One worker at a time, for one event loop; ``client`` talks to it.

    Args:
        config: what the worker runs.
        name: of the model, in logs.
        heartbeat_timeout: seconds without a sign of life after which the worker is replaced.
        step_timeout: seconds that one batch may take.
        start_timeout: seconds that loading may take.
        max_buffered_events: events that a request may hold unread.
    """

    def __init__(
        self,
        config: wire.WorkerConfig,
        *,
        name: str = "model",
        heartbeat_timeout: float = 10.0,
        step_timeout: float = 600.0,
        start_timeout: float = 600.0,
        max_buffered_events: int = 4096,
    ) -> None:
        self.config = config
        self.name = name
        self.restarts = 0
        self.last_death = ""
        self.info: wire.ModelInfo | None = None
        self.stats = wire.Stats()
        scheduler = config.scheduler
        self.client = WorkerClient(
            max_open=scheduler.max_queue + (scheduler.max_sequences or 16),
            max_buffered_events=max_buffered_events,
        )
        # the bound on the queue is the client's: what it carries over a death must not be refused
        self._worker_config = msgspec.structs.replace(
            config, scheduler=dataclasses.replace(scheduler, max_queue=2**31)
        )
        self._heartbeat_timeout = heartbeat_timeout
        self._step_timeout = step_timeout
        self._start_timeout = start_timeout
        self._folder: Path | None = None
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None
        self._first: asyncio.Future[wire.ModelInfo] | None = None
        self._generation = 0
        self._last_beat = 0.0
        self._ready = False
        self._closing = False
        self._born = 0.0
        self._last_pid = 0

    # -------------------------------------------------------------------------------------- lifetime

    async def start(self) -> wire.ModelInfo:
        """Start the worker and wait until it takes requests.

        Raises:
            LlamaherdError: what kept it from starting (no such file, not enough memory, ...).
        """
        if self._closing:
            raise ClosedError("supervisor")
        if self._task is None:
            self._folder = Path(tempfile.mkdtemp(prefix="llamaherd-"))  # for its owner only
            self._first = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run(), name=f"supervisor of {self.name}")
        assert self._first is not None
        return await asyncio.shield(self._first)

    async def close(self, timeout: float = 5.0) -> None:
        """Stop the worker, which keeps its cache first; what is open ends with ClosedError. Idempotent."""
        self._closing = True
        self.client.refuse(ClosedError("server"))
        child = self._child
        if child is not None and self._ready:
            child.link.send(wire.Stop())
            await asyncio.wait({child.exited}, timeout=timeout)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def ready(self) -> bool:
        """Whether a worker takes requests now."""
        return self._ready

    @property
    def pid(self) -> int | None:
        """The worker's process id, while there is one."""
        return self._child.pid if self._child is not None else None

    # ----------------------------------------------------------------------------------------- within

    async def _run(self) -> None:
        futile = 0
        while True:
            await asyncio.sleep(_BACKOFF[min(futile, len(_BACKOFF) - 1)])
            before = self.client.events
            try:
                death = await self._one_life()
            except LlamaherdError as error:
                if self._failed_to_start(error):
                    return
                futile = max(futile + 1, 4)
                continue
            if self._told_to_stop:
                return
            futile = futile + 1 if self.client.events == before else 0
            self.last_death = death.how
            self.restarts += 1
            log.error("the worker of %s (pid %s) %s; starting another", self.name, self._last_pid, death.how)
            self.client.detach(death)

    def _failed_to_start(self, error: LlamaherdError) -> bool:
        """Say why; whether to give up, because it never started at all."""
        log.error("the worker of %s cannot start: %s", self.name, error)
        self.last_death = str(error)
        self.client.refuse(error)
        if self._first is None or self._first.done():
            return False
        self._first.set_exception(error)
        return True

    @property
    def _told_to_stop(self) -> bool:
        return self._closing

    async def _one_life(self) -> Death:
        """Start a worker and see it to its end. Raises what it says keeps it from starting."""
        assert self._folder is not None
        self._generation += 1
        link = Link(self._folder, str(self._generation))
        oom_before = oom_kills()
        self.stats = wire.Stats()  # those of the last worker say nothing of this one
        child = self._child = Child(self._worker_config, link)
        self._last_pid = child.pid
        self._last_beat = self._born = time.monotonic()
        receiving = asyncio.create_task(self._receive(link))
        watching = asyncio.create_task(self._watch(child))
        try:
            waiting: set[asyncio.Future[Any]] = {receiving, watching, child.exited}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                error = receiving.exception()
                if isinstance(error, LlamaherdError):  # what keeps it from starting
                    raise error
                return Death(f"sent what nobody understands ({error!r}) and was replaced", blames=True)
            if watching.done():
                return watching.result()
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
            for message in await link.drain():
                self._take(message, link)
            return child.death(oom_kills() > oom_before)
        finally:
            self._ready = False
            self._child = None
            for task in (receiving, watching):
                task.cancel()
            await asyncio.gather(receiving, watching, return_exceptions=True)
            await child.kill()
            link.close()

    async def _receive(self, link: Link) -> None:
        while True:
            self._take(await link.receive(), link)

    def _take(self, message: wire.Up, link: Link) -> None:
        self._last_beat = time.monotonic()
        if isinstance(message, wire.Heartbeat):
            self.stats = message.stats
        elif isinstance(message, wire.Ready):
            if message.version != wire.VERSION:
                raise WorkerStartError(f"the worker speaks version {message.version}, not {wire.VERSION}")
            self.info = message.info
            self._ready = True
            seconds = time.monotonic() - self._born
            log.info("the worker of %s (pid %s) is ready after %.2f s", self.name, self.pid, seconds)
            if self._first is not None and not self._first.done():
                self._first.set_result(message.info)
            self.client.attach(link)
        elif isinstance(message, wire.StartFailed):
            raise wire.unpack_error(message.error)
        else:
            self.client.receive(message)

    async def _watch(self, child: Child) -> Death:
        """Wait until the worker gives cause to be replaced."""
        tick = self.config.heartbeat
        while True:
            slept = time.monotonic()
            await asyncio.sleep(tick)
            now = time.monotonic()
            if now - slept > tick + 1.0:
                self._last_beat = now  # it was this process that was held up
            if now - self._last_beat > self._heartbeat_timeout:
                stopped = was_stopped(child.pid)
                what = "was stopped (SIGSTOP)" if stopped else "gave no sign of life"
                return Death(f"{what} for {self._heartbeat_timeout:g} s and was replaced", not stopped)
            if self.stats.step_seconds > self._step_timeout and self._ready:
                return Death(
                    f"was stuck in one batch for {self.stats.step_seconds:.0f} s and was replaced", True
                )
            limit = self.config.memory_limit
            if limit and self.stats.memory > limit:
                taken = f"{self.stats.memory >> 20} MiB, over its limit of {limit >> 20} MiB"
                return Death(f"took {taken}, and was replaced", blames=True)
            if not self._ready and now - self._born > self._start_timeout:
                raise WorkerStartError(f"loading took longer than {self._start_timeout:g} s")
