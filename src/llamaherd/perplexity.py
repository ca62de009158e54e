"""How well a model predicts a text, and how far two models' predictions are apart.

The windows are those of transformers' recipe for models of fixed length: each starts ``stride`` tokens after
the one before, and only tokens that no earlier window has predicted count. Every token so has at least
``window - stride`` tokens before it, except in the first window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .engine.context import Context
from .engine.protocol import Batch, Engine
from .errors import InvalidParameterError, LogitsError, PromptTooLongError, RequestError
from .logits import log_normalizers

__all__ = ["Comparison", "Perplexity", "compare", "perplexity", "windows"]

Progress = Callable[[int, int], None]
"""Called as (tokens done, tokens in all)."""

_PIECE = 64  # tokens decoded at once: bounds the logits in memory


@dataclass(frozen=True, eq=False)
class Perplexity:
    """How well a text was predicted.

    Attributes:
        logprobs: float64 [n], the natural log-probability of each counted token.
    """

    logprobs: NDArray[np.float64]

    @property
    def n_tokens(self) -> int:
        """Counted tokens."""
        return len(self.logprobs)

    @property
    def mean(self) -> float:
        """Mean negative log-likelihood in nats a token."""
        return float(-self.logprobs.mean())

    @property
    def error(self) -> float:
        """Standard error of ``mean``."""
        return float(self.logprobs.std(ddof=1) / math.sqrt(self.n_tokens)) if self.n_tokens > 1 else math.nan

    @property
    def value(self) -> float:
        """exp(mean): the perplexity."""
        return math.exp(self.mean)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two models' predictions of one text, token by token.

    Attributes:
        first, second: how well each predicted the text.
        divergence: float64 [n], KL(first || second) in nats at each counted token.
        agreement: bool [n], whether the most probable tokens are the same.
    """

    first: Perplexity
    second: Perplexity
    divergence: NDArray[np.float64]
    agreement: NDArray[np.bool_]

    @property
    def n_tokens(self) -> int:
        """Counted tokens."""
        return len(self.divergence)

    @property
    def top_agreement(self) -> float:
        """Share of tokens at which both models would choose the same."""
        return float(self.agreement.mean())

    @property
    def ratio(self) -> float:
        """The second perplexity over the first."""
        return math.exp(self.second.mean - self.first.mean)


def windows(n_tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, first counted token) of each window over a text of ``n_tokens``.

    Raises:
        InvalidParameterError: window < 2, or not 1 <= stride <= window.
    """
    if window < 2:
        raise InvalidParameterError("window", window, "an integer >= 2")
    if not 1 <= stride <= window:
        raise InvalidParameterError("stride", stride, f"an integer in [1, window ({window})]")
    done = 0
    for start in range(0, n_tokens, stride):
        end = min(start + window, n_tokens)
        first = max(done, start + 1)  # the first token of a window has nothing before it
        if first < end:
            yield start, end, first
        done = end
        if end == n_tokens:
            return


def perplexity(
    context: Engine,
    tokens: Sequence[int],
    *,
    window: int = 512,
    stride: int | None = None,
    progress: Progress | None = None,
) -> Perplexity:
    """Predict a text with a model.

    Args:
        tokens: the text, at least two tokens, BOS included where the model wants one.
        window: tokens that the model sees at once.
        stride: tokens between the starts of windows; default window // 2.

    Raises:
        InvalidParameterError, RequestError: window or stride is out of range; the text is too short.
        PromptTooLongError: the window does not fit the context.
        LogitsError: the model's logits are NaN.
    """
    found = [
        _targets(rows, targets)
        for (rows,), targets in _predictions((context,), tokens, window, stride, progress)
    ]
    return Perplexity(np.concatenate(found))


def compare(
    first: Engine,
    second: Engine,
    tokens: Sequence[int],
    *,
    window: int = 512,
    stride: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Predict a text with two models of one vocabulary, such as a file and its quantisation.

    Args, Raises: as perplexity(); RequestError also if the vocabularies differ.
    """
    sizes = [c.vocabulary.n_tokens for c in (first, second)]
    if sizes[0] != sizes[1]:
        raise RequestError(f"the models have {sizes[0]} and {sizes[1]} tokens; compare needs one vocabulary")
    a, b, divergence, agreement = [], [], [], []
    for (rows_a, rows_b), targets in _predictions((first, second), tokens, window, stride, progress):
        a.append(_targets(rows_a, targets))
        b.append(_targets(rows_b, targets))
        divergence.append(_divergence(rows_a, rows_b))
        agreement.append(rows_a.argmax(axis=1) == rows_b.argmax(axis=1))
    return Comparison(
        Perplexity(np.concatenate(a)),
        Perplexity(np.concatenate(b)),
        np.concatenate(divergence),
        np.concatenate(agreement),
    )


def _targets(rows: NDArray[np.float32], targets: NDArray[np.intp]) -> NDArray[np.float64]:
    """Log-probabilities of the targets [n] under logits [n, n_vocab]."""
    normalizers = log_normalizers(rows)
    if not np.isfinite(normalizers).all():
        raise LogitsError("NaN or +inf")
    result: NDArray[np.float64] = rows[np.arange(len(rows)), targets].astype(np.float64) - normalizers.astype(
        np.float64
    )
    return result


def _divergence(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float64]:
    """KL(a || b) of each row of logits [n, n_vocab]."""
    result = np.empty(len(a), np.float64)
    zero_a, zero_b = log_normalizers(a), log_normalizers(b)
    for i in range(len(a)):
        log_a = a[i] - zero_a[i]
        # rounding may leave a tiny negative number where the two are equal
        result[i] = max(0.0, float(np.exp(log_a, dtype=np.float64) @ (log_a - (b[i] - zero_b[i]))))
    return result


def _predictions(
    contexts: Sequence[Engine],
    tokens: Sequence[int],
    window: int,
    stride: int | None,
    progress: Progress | None,
) -> Iterator[tuple[list[NDArray[np.float32]], NDArray[np.intp]]]:
    """Logits of each model for counted tokens, piece by piece, and those tokens."""
    stride = max(1, window // 2) if stride is None else stride
    text = np.asarray(tokens, np.int32)
    if len(text) < 2:
        raise RequestError(f"a text of {len(text)} tokens has nothing to predict; give at least two")
    for context in contexts:
        if min(window, len(text)) > context.n_ctx:
            raise PromptTooLongError(window, context.n_ctx)
    n_vocab = contexts[0].vocabulary.n_tokens
    buffers = [np.empty((_PIECE, n_vocab), np.float32) for _ in contexts]
    for start, end, first in windows(len(text), window, stride):
        sequences = [context.memory.allocate() for context in contexts]
        try:
            for a in range(start, end - 1, _PIECE):
                b = min(a + _PIECE, end - 1)
                place = np.arange(a, b)
                wanted = place + 1 >= first
                count = int(wanted.sum())
                for context, sequence, buffer in zip(contexts, sequences, buffers, strict=True):
                    batch = Batch(
                        tokens=text[a:b],
                        positions=(place - start).astype(np.int32),
                        sequences=np.full(b - a, sequence, np.int32),
                        outputs=wanted,
                    )
                    if isinstance(context, Context):  # before another thread's decode can overwrite them
                        context.run(batch, into=(buffer, np.arange(count)))
                    else:
                        buffer[:count] = context.decode(batch)
                if count:
                    yield [buffer[:count] for buffer in buffers], text[a + 1 : b + 1][wanted].astype(np.intp)
        finally:
            for context, sequence in zip(contexts, sequences, strict=True):
                context.memory.release(sequence)
        if progress is not None:
            progress(end, len(text))
