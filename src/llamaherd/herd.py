"""A herd: many sequences over one model, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any

from .config import SamplingConfig, SchedulerConfig
from .engine.context import Context
from .engine.model import Model
from .engine.protocol import Engine
from .errors import InvalidParameterError, UnsupportedError
from .scheduler.handle import Handle
from .scheduler.loop import Scheduler, SchedulerStats
from .suggestions import suggest
from .types import Event, Failed, Finished, GenerationRequest, Prompt, Suggestion

__all__ = ["Herd"]


class Herd:
    """Runs requests on a model, many at once, in a thread of its own. Any thread may use it.

    Args:
        model: a loaded Model, or any Engine (which the herd then closes with itself).
        max_sequences: candidates that decode at once.
        max_queue: requests that may wait; one more raises QueueFullError.
        prefix_cache: keep finished sequences for prompts that begin alike.
        scheduler: all of the scheduler's settings, in place of the three above.
        context_params: llama.cpp's own context parameters by their names (``n_ctx``, ``n_threads``,
            ``type_k``, ``flash_attn_type``, ``kv_unified``, ...). ``n_ctx`` tokens are shared by all
            sequences (``kv_unified=True``, the default) or split among them.

    Raises:
        ConfigError: a parameter is unknown or out of range.
        ContextError: llama.cpp could not make the context.
    """

    def __init__(
        self,
        model: Model | Engine,
        *,
        max_sequences: int = 16,
        max_queue: int = 1024,
        prefix_cache: bool = True,
        scheduler: SchedulerConfig | None = None,
        **context_params: Any,
    ) -> None:
        if scheduler is not None and not isinstance(scheduler, SchedulerConfig):
            raise InvalidParameterError("scheduler", scheduler, "a SchedulerConfig")
        config = scheduler or SchedulerConfig(
            max_sequences=max_sequences, max_queue=max_queue, prefix_cache=prefix_cache
        )
        if isinstance(model, Model):
            context_params.setdefault("n_seq_max", config.n_seq_max)
            context = Context(model, **context_params)
            if not context.generates:
                context.close()
                raise UnsupportedError(
                    f"{model.architecture} models do not continue text with llama_decode alone; "
                    "take a decoder-only model, or Context(model).embed() for embeddings"
                )
            self.engine: Engine = context
        elif not isinstance(model, Engine):
            raise InvalidParameterError("model", model, "a Model or an Engine")
        elif context_params:
            raise TypeError(f"an Engine is already made; {', '.join(context_params)} cannot be applied")
        else:
            self.engine = model
        self._scheduler = Scheduler(self.engine, config)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llamaherd", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------- requests

    def submit(self, request: GenerationRequest) -> Handle:
        """Queue a request; read its events from the handle, or cancel() it.

        Raises:
            ClosedError, QueueFullError: the herd is closed; too many requests wait.
            RequestError, ConfigError: the request cannot be served as it stands.
        """
        return self._scheduler.submit(request)

    def generate(self, request: GenerationRequest, timeout: float | None = None) -> Finished:
        """Run a request to its end. Raises as submit() does, and the error that ended it."""
        handle = self.submit(request)
        try:
            return handle.result(timeout)
        except BaseException:
            handle.cancel()
            raise

    def stream(self, request: GenerationRequest) -> Iterator[Event]:
        """Token events and one Finished or Failed. Leaving the loop early cancels the request.

        The request is submitted at once, not at the first event. Raises as submit() does.
        """
        events = _stream(self.submit(request))
        next(events)  # enter it: a generator that was never entered does not run its finally
        return events  # type: ignore[return-value]

    async def astream(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """stream() for asyncio: ``async for event in herd.astream(request)``.

        Ending the iteration early, or cancelling the task, cancels the request.
        """
        loop = asyncio.get_running_loop()
        submission = _Submission()
        submitting = loop.run_in_executor(None, lambda: submission.keep(self.submit(request)))
        try:
            handle = await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(_forget_failure)
            submission.cancel()
            raise
        changed = asyncio.Event()

        def notify() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(changed.set)

        handle.listen(notify)
        try:
            while True:
                changed.clear()
                while (event := handle.poll()) is not None:
                    yield event
                    if isinstance(event, (Finished, Failed)):
                        return
                await changed.wait()
        finally:
            handle.listen(None)
            handle.cancel()

    def suggest(
        self,
        prompt: Prompt,
        n: int = 8,
        max_tokens: int = 64,
        *,
        sampling: SamplingConfig | None = None,
        beam: bool = False,
        **request: Any,
    ) -> list[Suggestion]:
        """Distinct, non-empty continuations of a prompt, best first by length-normalised log-probability.

        One prefill, then n sequences decoded together. Samples that come out alike are replaced by
        further ones, up to 4n in all; if the model has no more to say, fewer than n come back.

        Args:
            prompt: text, token ids or PromptParts.
            n: how many; more than max_sequences run in waves.
            max_tokens: most tokens of each.
            sampling: how to draw; temperature 0.7 of the whole distribution if not given. With a seed the
                suggestions are the same each time.
            beam: exact beam search of width n in place of sampling (deterministic).
            request: further fields of GenerationRequest (``stop``, ``deadline``, ``client``, ...).

        Raises:
            As submit() does, and the error that ended the request.
        """
        return suggest(self.generate, prompt, n, max_tokens, sampling=sampling, beam=beam, **request)

    # ------------------------------------------------------------------------------- lifetime

    def stats(self) -> SchedulerStats:
        """A look at what goes on."""
        return self._scheduler.stats()

    def _run(self) -> None:
        scheduler = self._scheduler
        while not self._stop.is_set():
            try:
                # a step clears the wake-up, so the look at _stop comes between it and the wait
                if not scheduler.step() and not self._stop.is_set():
                    # paused readers and deadlines need a look now and then
                    scheduler.wait(0.05 if scheduler.busy else None)
            except Exception as error:
                scheduler.fail_all(error)
        # here and not in close(): a listener may call that in the middle of a step
        try:
            scheduler.close()
        finally:
            self.engine.close()

    def close(self) -> None:
        """End all requests with ClosedError, stop the thread and free the context; idempotent.

        Called by a listener it returns at once, and all that happens when the step in progress is done.
        """
        self._stop.set()
        self.engine.abort()
        self._scheduler.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Herd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _stream(handle: Handle) -> Iterator[Event | None]:
    try:
        yield None
        yield from handle
    finally:
        handle.cancel()


class _Submission:
    """A request that is being submitted in another thread, and may be cancelled meanwhile.

    Without the event loop's help, which may be closed by the time that the request is in.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handle: Handle | None = None
        self._cancelled = False

    def keep(self, handle: Handle) -> Handle:
        """The request is in; nobody may wait for it any more."""
        with self._lock:
            self._handle, cancelled = handle, self._cancelled
        if cancelled:
            handle.cancel()
        return handle

    def cancel(self) -> None:
        """Nobody waits for it."""
        with self._lock:
            self._cancelled, handle = True, self._handle
        if handle is not None:
            handle.cancel()


def _forget_failure(submitting: asyncio.Future[Handle]) -> None:
    """It was refused, and nobody asks why any more."""
    if not submitting.cancelled():
        submitting.exception()
