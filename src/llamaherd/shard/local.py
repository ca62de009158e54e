"""Stages as processes of this machine."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import msgspec

from ..errors import WorkerStartError
from ..processes import was_stopped
from ..wire_errors import unpack_error
from . import wire
from .process import Started

__all__ = ["LocalStages"]

log = logging.getLogger(__name__)

_PROGRAM = (
    "import os, sys; sys.path[:] = sys.argv[1:]; from llamaherd.shard.process import main; os._exit(main())"
)
_LOAD = 600.0  # seconds that a stage may take to load
_FROZEN = 8.0  # seconds that it may be stopped meanwhile
_MOST_STARTS = 3  # of processes that are killed while they load


class _Process:
    """One stage's."""

    def __init__(self, config: wire.StageConfig) -> None:
        self.stage = config.index
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", _PROGRAM, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # the terminal's Ctrl-C is the head's to handle
        )
        self.pid = self._process.pid
        self._words = ""
        self._answer: list[bytes] = []
        self._threads = [
            threading.Thread(target=work, name=f"stage {config.index}", daemon=True)
            for work in (self._read_answer, self._read_log)
        ]
        for thread in self._threads:
            thread.start()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it died at once; endpoint() tells
            wire.write_config(self._process.stdin, config)

    def _read_answer(self) -> None:
        assert self._process.stdout is not None
        with contextlib.closing(self._process.stdout) as stdout:
            self._answer.append(stdout.readline())

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        with contextlib.closing(self._process.stderr) as stderr:
            for line in stderr:
                self._words = line.decode("utf-8", "replace").rstrip() or self._words
                log.debug("stage %s: %s", self.pid, self._words)

    def endpoint(self) -> wire.Endpoint:
        """Where it listens, once it has loaded. Raises the error that kept it from loading."""
        self._await_answer()
        line = self._answer[0] if self._answer else b""
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):  # its end is a moment after its output's
                self._process.wait(2)
            how = self.death() or f"it has not loaded within {_LOAD:.0f} s"
            raise WorkerStartError(f"stage {self.stage} did not start: {how}", how)
        started = msgspec.json.decode(line, type=Started)
        if started.error is not None:
            raise unpack_error(started.error)
        assert started.endpoint is not None
        return started.endpoint

    def _await_answer(self) -> None:
        answer = self._threads[0]
        deadline = time.monotonic() + _LOAD
        running = time.monotonic()  # when it last was
        while answer.is_alive() and time.monotonic() < deadline:
            answer.join(0.5)
            if not was_stopped(self.pid):
                running = time.monotonic()
            elif time.monotonic() - running > _FROZEN:
                self._process.kill()
                how = f"its process was stopped (SIGSTOP) for {_FROZEN:g} s"
                raise WorkerStartError(f"stage {self.stage} did not start: {how}", how)

    def death(self) -> str | None:
        """How it ended, if it has."""
        code = self._process.poll()
        if code is None:
            return None
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"its process ended by {signal.Signals(-code).name}"
        return f"its process ended with code {code}: {self._words}"

    def close(self, seconds: float = 3.0) -> None:
        """End it, by force if it does not end by itself within some time."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(5)


@dataclass
class LocalStages:
    """A deployment of stages on this machine.

    Attributes:
        path: the whole model.
        cuts: layer numbers, from 0 to the number of layers: stage i holds layers [cuts[i], cuts[i + 1]).
        model_params, context_params: llama.cpp's own parameters, the same for all stages.
        activations: how hidden states travel: "f32" (exact), "f16" or "q8_0".
        slices: folder of the slice store.
    """

    path: str | PathLike[str]
    cuts: Sequence[int]
    model_params: dict[str, Any] = field(default_factory=dict)
    context_params: dict[str, Any] = field(default_factory=dict)
    activations: str = "f32"
    slices: str = ""
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        self.keys = wire.Keys.make()
        self._stage_keys = [wire.Keys.make() for _ in self.cuts[1:]]
        self._processes: dict[int, _Process] = {}

    @property
    def pids(self) -> list[int]:
        """Of the stages' processes, in order."""
        return [self._processes[i].pid for i in sorted(self._processes)]

    @property
    def n_stages(self) -> int:
        """Of this deployment."""
        return len(self.cuts) - 1

    @property
    def admitted(self) -> list[bytes]:
        """Public keys of the stages."""
        return [keys.public for keys in self._stage_keys]

    def replan(self) -> bool:
        """Nothing can be better elsewhere: there is no other machine."""
        return False

    def _config(self, index: int) -> wire.StageConfig:
        return wire.StageConfig(
            index=index,
            path=str(self.path),
            start=self.cuts[index],
            end=self.cuts[index + 1],
            slices=self.slices,
            model_params=self.model_params,
            context_params=self.context_params,
            host=self.host,
            keys=self._stage_keys[index],
            admitted=[self.keys.public, *self.admitted],
            activations=self.activations,
        )

    def start(self) -> list[wire.Endpoint]:
        """Start a process for each stage. Raises what kept one from loading."""
        started = self._start(range(self.n_stages))
        return [started[i] for i in sorted(started)]

    def _start(self, stages: Sequence[int]) -> dict[int, wire.Endpoint]:
        for index in stages:
            self._processes[index] = _Process(self._config(index))
        return {index: self._endpoint(index) for index in stages}

    def _endpoint(self, index: int) -> wire.Endpoint:
        for _ in range(_MOST_STARTS - 1):
            try:
                return self._processes[index].endpoint()
            except WorkerStartError as error:
                log.warning("%s; starting another", error)
                self._processes[index].close(0)
                self._processes[index] = _Process(self._config(index))
        return self._processes[index].endpoint()

    def lost(self) -> dict[int, str]:
        """Stages whose process has ended."""
        deaths = ((index, process.death()) for index, process in list(self._processes.items()))
        return {index: death for index, death in deaths if death is not None}

    def replace(self, stages: Mapping[int, str]) -> dict[int, wire.Endpoint]:
        """End these and start others in their place."""
        for index, cause in stages.items():
            log.warning("stage %d is replaced: %s", index, cause)
            self._processes[index].close(0)
        try:
            return self._start(list(stages))
        except WorkerStartError:
            raise
        except Exception as error:
            raise WorkerStartError(f"a stage cannot be started again: {error}", str(error)) from error

    def close(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.close()
        self._processes.clear()
