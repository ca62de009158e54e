"""Texts to be embedded: checked, grouped to what one forward pass takes, and laid out as a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..config import _integers
from ..errors import InvalidParameterError, PromptTooLongError, RequestError, TokenError
from .protocol import Batch

__all__ = ["as_batch", "check_texts", "take_group"]


def check_texts(texts: Any, *, n_vocab: int, longest: int) -> list[Sequence[int]]:
    """Token lists, at least one token each.

    Raises:
        InvalidParameterError: no sequence of integer sequences.
        TokenError, RequestError: a token is out of range; a text is empty.
        PromptTooLongError: a text has more than ``longest`` tokens.
    """
    if not isinstance(texts, (Sequence, np.ndarray)):
        raise InvalidParameterError("texts", texts, "a sequence of token lists")
    checked: list[Sequence[int]] = [_integers("texts", tokens) for tokens in texts]
    for tokens in checked:
        if not tokens:
            raise RequestError("an empty text has no embedding; give at least one token")
        for i, token in enumerate(tokens):
            if not 0 <= token < n_vocab:
                raise TokenError(token, n_vocab, i)
        if len(tokens) > longest:
            raise PromptTooLongError(len(tokens), longest + 1)
    return checked


def take_group(
    texts: Sequence[Sequence[int]], start: int, *, room: int, sequences: int
) -> Sequence[Sequence[int]]:
    """The next texts, from ``start``, that fit into ``room`` tokens and so many sequences."""
    end = start
    while end < len(texts) and end - start < max(1, sequences):
        room -= len(texts[end])
        if room < 0:
            break
        end += 1
    return texts[start:end]


def as_batch(texts: Sequence[Sequence[int]], sequences: Sequence[int]) -> Batch:
    """One batch of whole texts, each in a sequence of its own, all outputs wanted."""
    lengths = [len(tokens) for tokens in texts]
    return Batch(
        tokens=np.concatenate([np.asarray(tokens, np.int32) for tokens in texts]),
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        sequences=np.repeat(np.asarray(sequences, np.int32), lengths),
        outputs=np.ones(sum(lengths), np.bool_),
    )
