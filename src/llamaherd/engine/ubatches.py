"""How llama.cpp parts a batch into forward passes, and in which order it puts their tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .protocol import IntArray

__all__ = ["ubatches"]

Indices = NDArray[np.intp]


def ubatches(sequences: IntArray, n_ubatch: int, *, unified: bool) -> list[Indices]:
    """Indices of the tokens of each forward pass, in llama.cpp's order.

    A unified cache takes tokens as they come (``llama_batch_allocr::split_simple``). A split one takes the
    same number of tokens of sequences with consecutive ids, one sequence after the other
    (``split_equal``). Given to llama_decode one by one, the parts are computed exactly as the whole batch
    would be, and nothing is reordered.

    Args:
        sequences: int32 [n], the sequence of each token.
        n_ubatch: most tokens of a forward pass.
        unified: whether the sequences share one cache.
    """
    if unified:
        index = np.arange(len(sequences))
        return [index[a : a + n_ubatch] for a in range(0, len(index), n_ubatch)]
    left = {int(s): np.flatnonzero(sequences == s).tolist() for s in dict.fromkeys(sequences.tolist())}
    parts = []
    while left:
        chosen = _consecutive(sequences, left, n_ubatch)
        fit = max(1, n_ubatch // len(chosen))
        each = min(fit, *(len(left[s]) for s in chosen))
        parts.append(np.array([i for s in chosen for i in left[s][:each]], np.intp))
        left = {s: rest for s, rest in ((s, t[each:] if s in chosen else t) for s, t in left.items()) if rest}
    return parts


def _consecutive(sequences: IntArray, left: dict[int, list[int]], most: int) -> list[int]:
    """The sequence of the first token that is left, and those that follow it by one, as tokens come."""
    chosen: list[int] = []
    for index in sorted(i for tokens in left.values() for i in tokens):
        sequence = int(sequences[index])
        if not chosen or sequence == chosen[-1] + 1:
            chosen.append(sequence)
            if len(chosen) == most:
                break
    return chosen
