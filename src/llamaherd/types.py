"""What goes in (GenerationRequest) and what comes out (a stream of Token, then one Finished or Failed)."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from .config import SamplingConfig, _flag, _integers, _number, _text, _texts
from .errors import InvalidParameterError, LlamaherdError

__all__ = [
    "Completion",
    "Event",
    "Failed",
    "FinishReason",
    "Finished",
    "GenerationRequest",
    "Logprob",
    "Prompt",
    "PromptPart",
    "Suggestion",
    "Timings",
    "Token",
    "Usage",
]

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "deadline"]
"""Why a candidate ended: an end-of-generation token, stop string or stop token; ``max_tokens`` or the
context's end; cancel(); the deadline."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A stretch of a prompt. Only where ``parse_special`` is true can text become control tokens."""

    text: str
    parse_special: bool = False

    def __post_init__(self) -> None:
        _text("text", self.text)
        _flag("parse_special", self.parse_special)


Prompt: TypeAlias = str | Sequence[int] | Sequence[PromptPart]
"""Text (never parsed for control tokens), token ids as they are, or parts that say which is which."""


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt and what to make of it.

    Attributes:
        prompt: text, token ids or parts. Text gets the model's BOS once; token ids are taken as given.
        max_tokens: most tokens per candidate.
        n: independent candidates from one prefill; more than there are slots run in waves.
        sampling: how each token is drawn.
        beams: exact beam search of this width in place of sampling; ``n`` <= ``beams`` are returned, best
            first, and Token events come only at the end.
        length_penalty: exponent of the length that divides a beam's log-probability (as in transformers).
        stop: texts that end a candidate; the match and what follows it are not emitted.
        stop_tokens: token ids that end a candidate, beside the model's own end-of-generation tokens.
        ignore_eos: go on after end-of-generation tokens (they are never sampled).
        logprobs: with each token, the log-probabilities of this many most probable ones.
        deadline: seconds from submission; a candidate that still runs then ends with reason ``deadline``.
        client: requests of one client share its turn when there are more requests than slots.
        indices: run only these of the n candidates (None: all).
        resume: candidate index -> tokens that it has already produced elsewhere. They are not emitted again,
            and the log-probabilities in its Completion are those of the new tokens only.
        request_id: names the request in logs and errors.
    """

    prompt: Prompt
    max_tokens: int = 128
    n: int = 1
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    beams: int | None = None
    length_penalty: float = 1.0
    stop: Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int = 0
    deadline: float | None = None
    client: str = ""
    indices: Sequence[int] | None = None
    resume: Mapping[int, Sequence[int]] = field(default_factory=dict)
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        _number("max_tokens", self.max_tokens, 1, integer=True)
        _number("n", self.n, 1, 65536, integer=True)
        _number("logprobs", self.logprobs, 0, 1024, integer=True)
        _number("length_penalty", self.length_penalty, -10, 10)
        if not isinstance(self.sampling, SamplingConfig):
            raise InvalidParameterError("sampling", self.sampling, "a SamplingConfig")
        _flag("ignore_eos", self.ignore_eos)
        _text("client", self.client)
        _text("request_id", self.request_id)
        if self.beams is not None:
            _number("beams", self.beams, 1, 256, integer=True)
            if self.n > self.beams:
                raise InvalidParameterError("n", self.n, f"at most beams ({self.beams}) with beam search")
            if self.sampling.changes_logits:
                raise InvalidParameterError(
                    "beams",
                    self.beams,
                    "beam search follows the model's own distribution: no grammar, logit_bias or penalties",
                )
        if self.deadline is not None:
            _number("deadline", self.deadline, 0)
        # as tuples of our own: what the caller changes later must not reach a request that runs
        object.__setattr__(self, "stop", _texts("stop", self.stop))
        object.__setattr__(self, "stop_tokens", _integers("stop_tokens", self.stop_tokens))
        self._check_candidates()

    def _check_candidates(self) -> None:
        """``indices`` and ``resume`` name candidates that there are."""
        if self.indices is not None:
            indices = _integers("indices", self.indices)
            if not indices or len(set(indices)) < len(indices):
                raise InvalidParameterError("indices", indices, "at least one candidate, each named once")
            object.__setattr__(self, "indices", indices)
        if not isinstance(self.resume, Mapping):
            raise InvalidParameterError("resume", self.resume, "a mapping of candidates to token ids")
        resumed = _integers("resume", list(self.resume))
        tokens = (_integers(f"resume[{i}]", t) for i, t in zip(resumed, self.resume.values(), strict=True))
        object.__setattr__(self, "resume", dict(zip(resumed, tokens, strict=True)))
        for name, candidates in (("indices", self.indices or ()), ("resume", resumed)):
            if any(not 0 <= i < self.n for i in candidates):
                raise InvalidParameterError(name, candidates, f"candidates in [0, {self.n})")
        if self.beams is not None and (self.resume or self.indices is not None):
            raise InvalidParameterError("beams", self.beams, "beam search cannot be resumed; start it again")


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token, its bytes, and its natural log-probability in the model's unmodified distribution."""

    token: int
    piece: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """One more token of candidate ``index``.

    ``text`` is what became certain with it: it may be empty (half a character, or the beginning of what
    may be a stop text) or hold text of earlier tokens. Joined, the texts equal the completion's text.
    ``stop`` is the stop text that ended the candidate with this token, if one did; ``piece`` the token's own
    bytes (none of those that end a text).
    """

    index: int
    token: int
    text: str
    logprob: float
    top_logprobs: tuple[Logprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | None = None
    piece: bytes = b""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished candidate.

    Attributes:
        tokens: all tokens, an end-of-generation token included.
        logprobs: each token's natural log-probability in the unmodified distribution.
        stop: the stop text that ended it, if one did.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    stop: str | None = None

    @property
    def logprob(self) -> float:
        """Sum of the tokens' log-probabilities."""
        return sum(self.logprobs)

    @property
    def score(self) -> float:
        """Length-normalised log-probability: the mean over the tokens; 0 for no token."""
        return self.logprob / len(self.logprobs) if self.logprobs else 0.0


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One of several distinct ways to go on. ``score`` is ``logprob`` per token, by which they are ranked."""

    text: str
    tokens: tuple[int, ...]
    logprob: float
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the prompt, how many of them came from the prefix cache, and tokens produced."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds in the queue, from there to the first token (prefill), and from there to the end (decode)."""

    queued: float
    prefill: float
    decode: float

    @property
    def total(self) -> float:
        """Seconds from submission to the end."""
        return self.queued + self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class Finished:
    """The terminal event of a request that ran: its candidates, by index (beams: best first)."""

    completions: tuple[Completion, ...]
    usage: Usage
    timings: Timings

    @property
    def text(self) -> str:
        """The first candidate's text; empty if a beam search was stopped before its first token."""
        return self.completions[0].text if self.completions else ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The terminal event of a request that could not go on, and why."""

    error: LlamaherdError
    usage: Usage


Event: TypeAlias = Token | Finished | Failed
