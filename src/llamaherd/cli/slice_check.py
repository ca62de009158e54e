"""Prove slices: run the whole model and the slices in a chain on the same tokens, and compare every logit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike

import numpy as np

from llamaherd.engine.context import Context
from llamaherd.engine.model import Model
from llamaherd.engine.protocol import Batch, FloatArray, IntArray

__all__ = ["Comparison", "compare_slices"]

_SMALL = 32 << 20  # bytes


@dataclass(frozen=True)
class Comparison:
    """The largest difference between a whole model's logits and its slices', over ``n_logits`` logits.

    ``spread`` is the standard deviation of the whole's logits, for scale.
    """

    largest: float
    spread: float
    n_logits: int

    @property
    def exact(self) -> bool:
        """Whether not a single bit differs."""
        return self.largest == 0.0


def compare_slices(
    whole: str | PathLike[str],
    slices: Sequence[str | PathLike[str]],
    *,
    n_prompt: int = 64,
    n_tokens: int = 20,
    seed: int = 0,
) -> Comparison:
    """Run ``n_prompt`` random tokens and then ``n_tokens`` greedy ones through both; compare all logits.

    Both take the same tokens in the same batches, as other batches may round otherwise. A NaN anywhere
    counts as an infinite difference. Raises ModelLoadError, DecodeError and the like.
    """
    n_ctx = n_prompt + n_tokens + 1
    settings = {"n_ctx": n_ctx, "n_batch": n_prompt, "n_ubatch": n_prompt}
    models = [Model.load(path) for path in (whole, *slices)]
    if models[0].size < _SMALL:  # threads that wait for each other cost more than they compute
        settings |= {"n_threads": 1, "n_threads_batch": 1}
    try:
        reference, *parts = [
            Context(model, layer_outputs=index not in (0, len(models) - 1), **settings)
            for index, model in enumerate(models)
        ]
        for context in (reference, *parts):
            assert context.memory.allocate() == 0
        rng = np.random.default_rng(seed)
        tokens: IntArray = rng.integers(0, models[0].vocabulary.n_tokens, n_prompt).astype(np.int32)
        position, largest, spread, count = 0, 0.0, 0.0, 0
        for _ in range(n_tokens + 1):
            exact = reference.decode(_batch(tokens, None, position)).copy()
            difference = np.abs(exact - _chain(parts, tokens, position)).max()
            largest = max(largest, float(difference) if np.isfinite(difference) else float("inf"))
            spread = max(spread, float(exact.std()))
            count += exact.size
            position += len(tokens)
            tokens = exact[-1:].argmax(-1).astype(np.int32)
        return Comparison(largest, spread, count)
    finally:
        for model in models:
            model.close()


def _chain(parts: Sequence[Context], tokens: IntArray, position: int) -> FloatArray:
    """Logits of a chain: the first slice takes tokens, each hands its last layer's output on."""
    hidden: FloatArray | None = None
    for context in parts[:-1]:
        last = context.model.n_layer - 1
        batch = _batch(tokens, hidden, position)
        hidden = context.run(batch, logits=False, layers=[last]).layers[last].copy()
    return parts[-1].decode(_batch(tokens, hidden, position))


def _batch(tokens: IntArray, hidden: FloatArray | None, position: int) -> Batch:
    n = len(tokens)
    return Batch(
        tokens=tokens if hidden is None else None,
        positions=np.arange(position, position + n, dtype=np.int32),
        sequences=np.zeros(n, np.int32),
        outputs=np.ones(n, np.bool_),
        embeddings=hidden,
    )
