"""The worker: engine and scheduler in a process of its own. ``python -m llamaherd.worker.process``.

Its threads: main takes commands; *compute* steps the scheduler and sends what came of it; *heartbeat* says
that the process lives, whatever a decode does; *lifeline* ends the process when the server's end of standard
input closes; a few *callers* tokenise, so that a long text holds nobody up. Each sends through a socket of
its own.
"""

from __future__ import annotations

import collections
import importlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import zmq

from ..engine.context import Context
from ..engine.model import Model
from ..engine.parameters import split_parameters
from ..engine.protocol import Engine
from ..errors import LlamaherdError, NativeError, UnsupportedError
from ..scheduler.handle import Handle
from ..scheduler.loop import Scheduler
from ..types import Failed, Finished, Usage
from . import wire
from .kv_store import KVStore

__all__ = ["Worker", "main"]

_IDLE_LOOK = 0.05  # seconds between looks at paused readers and deadlines
_SEND_TIMEOUT = 120_000  # ms that the server may stop reading before the worker gives up


class Worker:
    """One worker.

    Args:
        config: what to run.
        up, down: addresses to send to and to listen at.
    """

    def __init__(self, config: wire.WorkerConfig, up: str, down: str) -> None:
        self.config = config
        self._up = up
        self._zmq = zmq.Context()
        self._commands = self._zmq.socket(zmq.PULL)
        self._commands.setsockopt(zmq.RCVHWM, 0)
        self._commands.bind(down)
        self._local = threading.local()
        self._handles: dict[int, Handle] = {}
        self._cancelled: set[int] = set()
        self._lock = threading.Lock()
        self._dirty: collections.deque[int] = collections.deque()
        self._jobs: collections.deque[Callable[[], None]] = collections.deque()
        self._stopping = threading.Event()
        self._step_began = 0.0
        self._scheduler: Scheduler | None = None
        self._store: KVStore | None = None
        self._stage_seconds: dict[int, tuple[float, float]] = {}  # by process: when, and computed by then
        self._callers = ThreadPoolExecutor(4, thread_name_prefix="caller")

    # ------------------------------------------------------------------------------- the thread main

    def run(self) -> int:
        """Load, serve until told to stop; the exit code."""
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        try:
            engine, info = self._load()
        except LlamaherdError as error:
            self._send(wire.StartFailed(wire.pack_error(error)))
            self._hang_up()
            return 1
        self._scheduler = scheduler = Scheduler(engine, self.config.scheduler)
        if self.config.cache_dir and isinstance(engine, Context):
            self._store = KVStore(Path(self.config.cache_dir), self.config.cache_bytes, engine, scheduler)
        compute = threading.Thread(target=self._compute, name="compute", daemon=True)
        compute.start()
        self._send(wire.Ready(wire.VERSION, info))
        while not self._stopping.is_set():
            self._obey(wire.decode_down(self._commands.recv()))
        scheduler.wake()
        engine.abort()
        compute.join()
        if self._store is not None:
            self._store.save_idle()
        scheduler.close()
        engine.close()
        self._hang_up()
        return 0

    def _load(self) -> tuple[Engine, wire.ModelInfo]:
        config = self.config
        if config.engine:
            module, _, function = config.engine.partition(":")
            engine: Engine = getattr(importlib.import_module(module), function)()
            memory = engine.memory
            slots = min(config.scheduler.max_sequences or memory.n_sequences, memory.n_sequences)
            return engine, wire.ModelInfo(
                n_vocab=engine.vocabulary.n_tokens, n_ctx=engine.n_ctx, max_sequences=slots
            )
        model_params, context_params = split_parameters(config.params, of="llama.cpp")
        context_params = {"n_seq_max": config.scheduler.n_seq_max} | context_params
        if config.stages or config.cluster:
            from ..shard.opening import open_cluster, open_stages

            params = {"model_params": model_params, **context_params}
            pipeline = (
                open_cluster(config.model, config.cluster, few_machines=config.few_machines, **params)
                if config.cluster
                else open_stages(config.model, config.stages, **params)
            )
            return pipeline, _info(pipeline.model, pipeline, config.scheduler.slots)
        model = Model.load(config.model, loras=config.loras, **model_params)
        context = Context(model, **context_params)
        return context, _info(model, context, config.scheduler.slots)

    def _obey(self, message: wire.Down) -> None:
        if isinstance(message, wire.Submit):
            self._callers.submit(self._guarded, lambda: self._submit(message))
        elif isinstance(message, wire.Cancel):
            self._cancel(message.id)
        elif isinstance(message, wire.Call):
            if isinstance(message.call, wire.EmbedCall):
                self._jobs.append(lambda: self._answer(message))
                self._running.wake()
            else:
                self._callers.submit(self._guarded, lambda: self._answer(message))
        else:
            self._stopping.set()

    @property
    def _running(self) -> Scheduler:
        assert self._scheduler is not None
        return self._scheduler

    # --------------------------------------------------------------------------------- the callers

    def _guarded(self, function: Callable[[], None]) -> None:
        """What nobody foresaw ends the process in the open; the server resumes what can be resumed."""
        try:
            function()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(70)

    def _submit(self, message: wire.Submit) -> None:
        try:
            handle = self._running.submit(wire.unpack_request(message.request))
        except LlamaherdError as error:
            failed = (message.id, wire.pack_error(error), Usage(0, 0))
            self._send(wire.Events(failed=[failed]))
            with self._lock:
                self._cancelled.discard(message.id)
            return
        with self._lock:
            self._handles[message.id] = handle
            cancelled = message.id in self._cancelled
            self._cancelled.discard(message.id)
        handle.listen(lambda: self._dirty.append(message.id))
        if cancelled:
            handle.cancel()
        self._dirty.append(message.id)  # events that came before listen()
        self._running.wake()

    def _cancel(self, number: int) -> None:
        with self._lock:
            handle = self._handles.get(number)
            if handle is None:
                self._cancelled.add(number)  # not submitted yet, or over
                if len(self._cancelled) > 100_000:
                    self._cancelled.clear()
        if handle is not None:
            handle.cancel()

    def _answer(self, message: wire.Call) -> None:
        call = message.call
        try:
            if isinstance(call, wire.EmbedCall):
                reply = self._embed(message.id, call)
            elif call.detokenize:
                vocabulary = self._running.engine.vocabulary
                tokens = vocabulary.encode_prompt(call.prompt.tokens or [])
                text = b"".join(vocabulary.piece(t) for t in tokens).decode("utf-8", "replace")
                reply = wire.Reply(message.id, text=text)
            else:
                prompt = wire.unpack_prompt(call.prompt)
                reply = wire.Reply(message.id, tokens=self._running.engine.vocabulary.encode_prompt(prompt))
        except LlamaherdError as error:
            reply = wire.Reply(message.id, error=wire.pack_error(error))
        self._send(reply)

    def _embed(self, number: int, call: wire.EmbedCall) -> wire.Reply:
        """In the compute thread, between steps: idle sequences are evicted to make room."""
        engine = self._running.engine
        if not isinstance(engine, Context):
            raise UnsupportedError("this engine gives no embeddings; serve a model file")
        texts = [engine.vocabulary.encode_prompt(wire.unpack_prompt(p)) for p in call.prompts]
        longest = max((len(t) for t in texts), default=0)
        self._running.make_room(sequences=min(len(texts), 16), cells=max(longest, engine.n_ubatch))
        rows = engine.embed(texts, normalize=call.normalize)
        return wire.Reply(
            number, rows=rows.tobytes(), width=rows.shape[1], n_tokens=sum(len(t) for t in texts)
        )

    # ------------------------------------------------------------------------------ the thread compute

    def _compute(self) -> None:
        scheduler = self._running
        while not self._stopping.is_set():
            self._step_began = time.monotonic()
            try:
                worked = scheduler.step()
                while self._jobs:
                    self._jobs.popleft()()
                if not worked and self._store is not None:
                    worked = self._store.save_some()
            except Exception as error:
                traceback.print_exc()
                scheduler.fail_all(error)
                worked = True
            self._step_began = 0.0
            self._flush()
            if not worked and not self._jobs:
                scheduler.wait(_IDLE_LOOK if scheduler.busy else None)

    def _flush(self) -> None:
        """Send all events that are there in one message."""
        events = wire.Events([], [], [])
        while self._dirty:
            number = self._dirty.popleft()
            with self._lock:
                handle = self._handles.get(number)
            while handle is not None and (event := handle.poll()) is not None:
                if isinstance(event, Finished):
                    events.finished.append((number, event))
                elif isinstance(event, Failed):
                    events.failed.append((number, wire.pack_error(event.error), event.usage))
                else:
                    events.tokens.append((number, event))
                    continue
                with self._lock:
                    del self._handles[number]
        if events:
            self._send(events)

    # ------------------------------------------------------------------------------ signs of life

    def _beat(self) -> None:
        while True:
            self._send(wire.Heartbeat(self._stats()))
            time.sleep(self.config.heartbeat)

    def _stats(self) -> wire.Stats:
        began = self._step_began
        step_seconds = time.monotonic() - began if began else 0.0
        memory = _own_memory()
        if self._scheduler is None:
            return wire.Stats(memory=memory)
        try:
            stats = self._scheduler.stats()
        except RuntimeError:  # a dictionary grew while it was counted
            return wire.Stats(memory=memory, step_seconds=step_seconds)
        return wire.Stats(
            waiting=stats.waiting,
            running=stats.running,
            cached_sequences=stats.cached_sequences,
            used_cells=stats.used_cells,
            n_cells=stats.n_cells,
            decoded_tokens=stats.decoded_tokens,
            prefilled_tokens=stats.prefilled_tokens,
            reused_tokens=stats.reused_tokens,
            restored_tokens=self._store.restored_tokens if self._store is not None else 0,
            steps=stats.steps,
            memory=memory,
            step_seconds=step_seconds,
            recoveries=getattr(self._scheduler.engine, "recoveries", 0),
            stages=self._stages(),
        )

    def _stages(self) -> list[wire.StageStats]:
        chain = getattr(self._running.engine, "chain", None)
        if chain is None:
            return []
        now, found = time.monotonic(), []
        for stage in chain.status():
            then, computed = self._stage_seconds.get(stage.pid, (now, stage.seconds))
            if now - then >= 2 or stage.pid not in self._stage_seconds:
                self._stage_seconds[stage.pid] = (now, stage.seconds)
            busy = (stage.seconds - computed) / (now - then) if now > then else 0.0
            facts = stage.facts
            found.append(
                wire.StageStats(
                    facts.start, facts.end, facts.size, stage.used_cells, stage.latency, min(1.0, busy),
                    stage.host, stage.pid,
                )
            )  # fmt: skip
        return found

    def _send(self, message: wire.Up) -> None:
        """Send from any thread, each through its own socket."""
        socket = getattr(self._local, "socket", None)
        if socket is None:
            socket = self._local.socket = self._zmq.socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, 1000)
            socket.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT)
            socket.connect(self._up)
        try:
            socket.send(wire.encode(message))
        except zmq.Again:
            os._exit(71)  # the server does not read any more

    def _hang_up(self) -> None:
        """Give the last messages a moment to leave."""
        self._callers.shutdown(wait=False, cancel_futures=True)
        socket = getattr(self._local, "socket", None)
        if socket is not None:
            socket.close()
        time.sleep(0.05)


def _info(model: Model, engine: Engine, slots: int) -> wire.ModelInfo:
    vocabulary = model.vocabulary

    def number(key: str) -> int:  # of a vocabulary alone llama.cpp tells no sizes
        return int(model.metadata.get(f"{model.architecture}.{key}", 0))

    def text(token: int | None) -> str:
        return "" if token is None else vocabulary.piece(token, special=True).decode("utf-8", "replace")

    return wire.ModelInfo(
        architecture=model.architecture,
        description=model.description,
        n_params=model.n_params,
        size=model.size,
        n_vocab=vocabulary.n_tokens,
        n_ctx=engine.n_ctx,
        n_ctx_train=model.n_ctx_train or number("context_length"),
        n_embd=model.n_embd or number("embedding_length"),
        max_sequences=min(slots, engine.memory.n_sequences),
        chat_template=model.chat_template(),
        tool_template=model.chat_template("tool_use"),
        bos=text(vocabulary.bos),
        eos=text(vocabulary.eos),
        pad=text(vocabulary.pad),
        add_bos=vocabulary.add_bos,
        control_texts=tuple(vocabulary.control_texts()),
    )


def _own_memory() -> int:
    """Bytes of anonymous memory: what mapped model files take is the page cache's."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0


def _watch_lifeline() -> None:
    """End with the server: its end of standard input closes when it does, however it ends."""
    while os.read(0, 4096):
        pass
    os._exit(0)


def main() -> int:
    """Read the settings from standard input and serve."""
    stdin = os.fdopen(0, "rb", buffering=0, closefd=False)
    config, up, down = wire.read_config(stdin)
    threading.Thread(target=_watch_lifeline, name="lifeline", daemon=True).start()
    try:
        code = Worker(config, up, down).run()
    except NativeError:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    # without the interpreter's finalisation: threads may still be inside libllama
    os._exit(main())
