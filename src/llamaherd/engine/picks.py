"""Drawing a token, wherever the logits are: beside the scheduler, or on a pipeline's last stage."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..config import SamplingConfig
from ..errors import GrammarError
from ..logits import top_k
from .protocol import Draw, FloatArray, Pick, TokenSampler

__all__ = ["is_memoryless", "pick_token"]


def is_memoryless(config: SamplingConfig) -> bool:
    """Whether a token depends on nothing but its logits and its number.

    Grammars, penalties, DRY and mirostat follow the text so far; XTC draws numbers of its own.
    """
    remembers = config.penalty_last_n and (
        config.repeat_penalty != 1 or config.frequency_penalty or config.presence_penalty
    )
    return not (
        remembers
        or config.grammar is not None
        or config.json_schema is not None
        or config.dry_multiplier
        or config.mirostat
        or config.xtc_probability
    )


def pick_token(sampler: TokenSampler, logits: FloatArray, norm: float, draw: Draw) -> Pick:
    """Draw a token from logits [n_vocab]; they are as before afterwards, and are not copied.

    Args:
        sampler: with the settings of ``draw``.
        norm: log(sum(exp(logits))).

    Raises as `TokenSampler.sample`.
    """
    complete = False
    if draw.without:
        try:
            token = _sample_without(np.array(draw.without, np.intp), sampler, logits, draw.number)
        except GrammarError:  # the text that the grammar describes is complete: only an end fits
            token, complete = sampler.sample(logits, draw.number), True
    else:
        token = sampler.sample(logits, draw.number)
    top = tuple((int(t), float(logits[t]) - norm) for t in top_k(logits, draw.top))
    return Pick(token, float(logits[token]) - norm, top, complete)


def _sample_without(
    tokens: NDArray[np.intp], sampler: TokenSampler, logits: FloatArray, number: float
) -> int:
    kept = logits[tokens]
    logits[tokens] = -np.inf
    try:
        return sampler.sample(logits, number)
    finally:
        logits[tokens] = kept
