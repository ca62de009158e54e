"""What the server's process remembers of a request, so that it can go on in another worker.

Pure bookkeeping: events go in as a worker sends them, and come out as the user is to see them, whatever
number of workers they came from.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from dataclasses import dataclass, field

from ..types import Completion, Finished, FinishReason, GenerationRequest, Timings, Token, Usage

__all__ = ["Record"]


@dataclass
class _Candidate:
    """One continuation as far as it is known here."""

    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | None = None

    def completion(self) -> Completion:
        return Completion(
            self.index,
            "".join(self.text),
            tuple(self.tokens),
            tuple(self.logprobs),
            self.finish_reason or "cancelled",
            self.stop,
        )


class Record:
    """A request and what has come of it.

    A request without a seed is given one: its draws must be the same in the next worker.
    """

    def __init__(self, request: GenerationRequest) -> None:
        if request.sampling.seed is None:
            sampling = request.sampling.replace(seed=secrets.randbits(32))
            request = dataclasses.replace(request, sampling=sampling)
        self.request = request
        self.submitted = time.monotonic()
        self.first_token: float | None = None
        self.strikes = 0  # deaths of a worker that this request may have caused
        self.setbacks = 0  # deaths since it last got on
        indices = range(request.n) if request.indices is None else request.indices
        self._candidates = {i: _Candidate(i, list(request.resume.get(i, ()))) for i in indices}
        self._usage: Usage | None = None
        self._queued: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens that came so far."""
        return sum(len(c.logprobs) for c in self._candidates.values())

    # ------------------------------------------------------------------------------ events of a worker

    def token(self, event: Token) -> None:
        """A token came. (Those of beams come at the end, all at once.)"""
        if self.first_token is None:
            self.first_token = time.monotonic()
        self.strikes = self.setbacks = 0
        candidate = self._candidates.setdefault(event.index, _Candidate(event.index))
        candidate.tokens.append(event.token)
        candidate.logprobs.append(event.logprob)
        candidate.text.append(event.text)
        if event.finish_reason is not None:
            candidate.finish_reason = event.finish_reason
            candidate.stop = event.stop

    def finished(self, event: Finished) -> Finished:
        """The worker's last event, completed by what earlier workers sent."""
        if self._usage is None:
            self._usage = event.usage
        if self.request.beams is not None:
            return event
        for completion in event.completions:
            candidate = self._candidates[completion.index]
            # cut short, a candidate may still hold text back, which no Token brought
            candidate.text = [completion.text]
            candidate.finish_reason = completion.finish_reason
            candidate.stop = completion.stop
        return self._whole(event.timings)

    # ----------------------------------------------------------------------------- between two workers

    def resume(self) -> GenerationRequest | Finished:
        """The request that goes on where this one is; or its end, if only the last event is missing."""
        request = self.request
        if request.beams is not None:
            return self._with_time_left(request)
        open_ = [c for c in self._candidates.values() if c.finish_reason is None]
        if not open_:
            return self._whole(None)
        going_on = dataclasses.replace(
            request,
            indices=[c.index for c in open_],
            resume={c.index: list(c.tokens) for c in open_ if c.tokens},
        )
        return self._with_time_left(going_on)

    def _with_time_left(self, request: GenerationRequest) -> GenerationRequest:
        if request.deadline is None:
            return request
        left = request.deadline - (time.monotonic() - self.submitted)
        return dataclasses.replace(request, deadline=max(left, 1e-3))

    def usage(self) -> Usage:
        """Tokens so far."""
        known = self._usage or Usage(0, 0)
        produced = sum(len(c.tokens) for c in self._candidates.values())
        return Usage(known.prompt_tokens, produced, known.cached_tokens)

    def _whole(self, last: Timings | None) -> Finished:
        now = time.monotonic()
        first = self.first_token if self.first_token is not None else now
        queued = min(last.queued, first - self.submitted) if last is not None else 0.0
        timings = Timings(queued, first - self.submitted - queued, now - first)
        completions = tuple(c.completion() for c in self._candidates.values())
        return Finished(completions, self.usage(), timings)
