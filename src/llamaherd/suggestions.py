"""Many distinct ways to go on from one prompt."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Generator
from typing import Any

from .config import SamplingConfig, _number
from .errors import ConfigError, UnknownParameterError
from .types import Completion, Finished, GenerationRequest, Prompt, Suggestion

__all__ = ["DEFAULT_SAMPLING", "rank", "suggest", "suggesting"]

DEFAULT_SAMPLING = SamplingConfig(temperature=0.7, top_k=0, top_p=1.0, min_p=0.0)
"""What suggestions are drawn with unless told otherwise: the model's own distribution, a little sharper."""

_WAVES = 4

_OWN = {"prompt", "n", "max_tokens", "sampling", "beams", "indices", "resume"}
_REQUEST = {field.name for field in dataclasses.fields(GenerationRequest)} - _OWN


def suggest(
    generate: Callable[[GenerationRequest], Finished],
    prompt: Prompt,
    n: int,
    max_tokens: int,
    **options: Any,
) -> list[Suggestion]:
    """Up to n distinct, non-empty suggestions, best first.

    Args:
        generate: runs a request to its end.
        options: see suggesting().
    """
    asking = suggesting(prompt, n, max_tokens, **options)
    request = next(asking)
    while True:
        try:
            request = asking.send(generate(request))
        except StopIteration as end:
            found: list[Suggestion] = end.value
            return found


def suggesting(
    prompt: Prompt,
    n: int,
    max_tokens: int,
    *,
    sampling: SamplingConfig | None = None,
    beam: bool = False,
    keep: Callable[[str], bool] | None = None,
    **request: Any,
) -> Generator[GenerationRequest, Finished, list[Suggestion]]:
    """suggest() without running anything: yields requests, is sent their ends, returns the suggestions.

    Which samples are drawn depends only on which of the earlier ones came out alike, so the same seed
    gives the same suggestions whatever the timing.

    Args:
        keep: whether a text is acceptable, beside not being empty.
        request: further fields of GenerationRequest.
    """
    base = sampling or DEFAULT_SAMPLING
    _number("n", n, 1, 65536 // _WAVES, integer=True)
    for name in request:
        if name not in _REQUEST:
            raise UnknownParameterError(name, _REQUEST, of="suggest()")
    found: dict[str, Completion] = {}
    if beam:
        final = yield GenerationRequest(prompt, max_tokens=max_tokens, n=n, beams=n, sampling=base, **request)
        _collect(found, final.completions, keep)
        return rank(list(found.values()), n)
    if base.greedy:
        raise ConfigError("temperature 0 gives one suggestion only; raise it, or ask for beam search")
    if base.seed is None:
        base = base.replace(seed=_fresh_seed())
    drawn = 0
    for _ in range(_WAVES):
        missing = n - len(found)
        if missing <= 0:
            break
        indices = range(drawn, drawn + missing)
        drawn += missing
        final = yield GenerationRequest(
            prompt, max_tokens=max_tokens, n=drawn, indices=indices, sampling=base, **request
        )
        _collect(found, final.completions, keep)
        if any(c.finish_reason in ("cancelled", "deadline") for c in final.completions):
            break
    return rank(list(found.values()), n)


def _collect(
    found: dict[str, Completion], completions: tuple[Completion, ...], keep: Callable[[str], bool] | None
) -> None:
    """Add what is new; of equal texts (after trimming) the more probable one stays."""
    for completion in completions:
        text = completion.text.strip()
        if not text or (keep is not None and not keep(completion.text)):
            continue
        known = found.get(text)
        if known is None or completion.score > known.score:
            found[text] = completion


def rank(completions: list[Completion], n: int) -> list[Suggestion]:
    """The n best by log-probability per token."""
    completions.sort(key=lambda c: (-c.score, c.text))
    return [Suggestion(c.text, c.tokens, c.logprob, c.score, c.finish_reason) for c in completions[:n]]


def _fresh_seed() -> int:
    return secrets.randbits(32)
