"""Whole models with llamaherd-kernels beside stock llama.cpp and other engines; see kernels.py.

Each engine is a process of its own, for a process has the kernels or has them not. All are up at once with the same
file and take turns, task by task, so that all see the same machine; who waits uses no CPU. A round is a prefill of 2048 tokens (which is timed
at 512 too) and decoding at depth 2048 and 32; printed are medians over the rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from model_files import FAMILIES, chosen, model_file
from model_work import N_BATCH, N_CTX, N_SEQ_MAX, TASKS, Ints, serve
from rows import Rows

IK_PEER = Path(__file__).with_name("ik_peer.py")


@dataclasses.dataclass(frozen=True)
class Command:
    """How an engine's process is started."""

    python: str = sys.executable
    script: str = __file__
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    request: dict[str, Any] = dataclasses.field(default_factory=dict)


def commands(options: argparse.Namespace) -> dict[str, Command]:
    """Of each engine that the options name; the first is ours."""
    ours = {"LLAMAHERD_KERNELS": "require"}
    off = {"LLAMAHERD_KERNELS": "off"}
    found = {
        "ours": Command(environment=ours, request={"level": options.level, "attention": True}),
        "stock": Command(environment=off),
    }
    if options.stock_attention:
        request = {"level": options.level, "attention": False}
        found["products"] = Command(environment=ours, request=request)
    if options.other:
        path = os.pathsep.join(filter(None, [options.other, os.environ.get("PYTHONPATH")]))
        # whoever built it says which of its kernels work
        found["other"] = Command(environment={**off, "PYTHONPATH": path, "LLAMAHERD_AMX": "on"})
    if options.ik:
        for name, repack in (("ik", False), ("ik repacked", True)):
            found[name] = Command(options.ik, str(IK_PEER), request={"repack": repack})
    return found


def compare_models(options: argparse.Namespace, rows: Rows) -> None:
    engines = commands(options)
    names = options.models or (list(FAMILIES) if options.full else ["smollm2"])
    others = [name for name in engines if name != "ours"]
    print(
        f"tokens/s, {options.threads} threads, medians of {options.rounds} rounds in turns; x: how many times as fast ours is"
    )
    print(
        f"{'model':18}{'what':>22}"
        + "".join(f"{name:>12}" for name in engines)
        + "".join(f"{'x ' + name:>14}" for name in others)
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for model, kind, given in chosen(names, options.types):
            try:
                path = given or model_file(model, kind, folder)
            except ImportError as error:
                print(f"{model} is left out: {error}", flush=True)
                continue
            found, problems = measure(path, engines, options)
            for what in dict.fromkeys(what for speeds in found.values() for what in speeds):
                medians = {
                    name: statistics.median(found[name][what]) for name in engines if what in found[name]
                }
                ratios = {
                    name: medians["ours"] / medians[name]
                    for name in others
                    if name in medians and "ours" in medians
                }
                print(
                    f"{f'{model} {kind}':18}{what:>22}"
                    + "".join(_cell(medians.get(name), 12, 1) for name in engines)
                    + "".join(_cell(ratios.get(name), 14, 2) for name in others),
                    flush=True,
                )
                rounds = {name: found[name][what] for name in medians}
                rows.add(
                    model=model,
                    type=kind,
                    what=what,
                    **medians,
                    ratios=ratios,
                    rounds=rounds,
                    problems=problems,
                )


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"


def measure(
    path: Path, engines: dict[str, Command], options: argparse.Namespace
) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """Tokens a second of each engine and measurement, of all rounds; and why an engine fell out, by its name."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in engines}
    problems: dict[str, str] = {}
    running: dict[str, Process] = {}

    def ask(name: str, task: str | None) -> None:
        try:
            if task is None:
                running[name] = Process(engines[name], path, options.threads)
            for what, speed in running[name].ask(task).items():
                found[name].setdefault(what, []).append(speed)
        except (EngineError, OSError) as error:  # OSError: no such interpreter
            if name in running:
                running.pop(name).close()
            problems[name] = str(error)
            found[name].clear()  # what it did before would be of fewer rounds
            print(f"{name} is left out: {error}", flush=True)

    try:
        for name in engines:
            ask(name, None)
        for turn in range(options.rounds):
            for task in TASKS:
                order = list(running)
                for name in order[turn % max(len(order), 1) :] + order[: turn % max(len(order), 1)]:
                    ask(name, task)
    finally:
        for process in running.values():
            process.close()
    return found, problems


class EngineError(Exception):
    """An engine's process ended."""


class Process:
    """An engine that does tasks when asked."""

    def __init__(self, command: Command, path: Path, threads: int) -> None:
        request = {"path": str(path), "threads": threads, **command.request}
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- close() does
        self._process = subprocess.Popen(
            [command.python, command.script, json.dumps(request)],
            env={**os.environ, **command.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def ask(self, task: str | None) -> dict[str, float]:
        """Tokens a second by measurement; with no task, that the model is loaded."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            if task is not None:
                self._process.stdin.write(task + "\n")
                self._process.stdin.flush()
        except BrokenPipeError:
            pass
        answer = self._process.stdout.readline()
        if not answer:
            raise EngineError(f"its process ended with status {self._process.wait()}: {self._last_words()}")
        speeds: dict[str, float] = json.loads(answer)
        return speeds

    def close(self) -> None:
        self._process.communicate()  # closes its input, which ends it
        self._errors.close()

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"


# ------------------------------------------------------------------------------------- an engine's process


class HerdEngine:
    """llama.cpp through llamaherd: an Engine of model_work.py."""

    def __init__(self, path: str, threads: int) -> None:
        from llamaherd import Context, Model

        self._model = Model.load(path)
        self._context = Context(
            self._model,
            n_ctx=N_CTX,
            n_batch=N_BATCH,
            n_ubatch=N_BATCH,
            n_seq_max=N_SEQ_MAX,
            n_threads=threads,
            n_threads_batch=threads,
            kv_unified=True,
            flash_attn_type="enabled",
        )
        self.n_vocab = self._model.vocabulary.n_tokens
        self._sequences: list[int] = []

    def start(self) -> None:
        self._context.memory.clear()
        self._sequences = [self._context.memory.allocate()]

    def compute(self, tokens: Ints, positions: Ints, sequences: Ints, every: bool) -> None:
        from llamaherd.engine.protocol import Batch

        outputs = np.full(len(tokens), every)
        outputs[-1] = True
        self._context.decode(
            Batch(tokens, positions, np.array(self._sequences, np.int32)[sequences], outputs)
        )

    def fork(self, n: int) -> None:
        self._sequences += [self._context.memory.fork(self._sequences[0]) for _ in range(1, n)]

    def rewind(self, n: int, depth: int) -> None:
        for sequence in self._sequences[1:]:
            self._context.memory.release(sequence)
        del self._sequences[1:]
        self._context.memory.trim(self._sequences[0], depth)


def main(request: dict[str, Any]) -> None:
    if os.environ["LLAMAHERD_KERNELS"] != "off":
        import llamaherd_kernels

        from llamaherd.native.amx import without_amx

        with without_amx():  # llama.cpp makes its list of kernels here, before the model is loaded
            llamaherd_kernels.enable(level=request["level"], attention=request["attention"])
    serve(HerdEngine(request["path"], request["threads"]), request["threads"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
