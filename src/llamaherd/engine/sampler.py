"""Drawing tokens: llama.cpp's sampler chain, and a shorter way for the common truncations.

Both end in the same draw: an inverse-CDF look-up with a number that the caller gives, so that token t of a
candidate depends on its seed and t alone, and a continued request repeats nothing and skips nothing.
(mirostat and XTC draw inside llama.cpp, from the seed: they are repeatable from the start only.)

The shorter way exists because llama.cpp's top-p sorts a whole vocabulary (4 ms at 49k tokens, 14 ms at
152k) and its softmax runs over it; cutting the candidates in numpy first gives the same set in a tenth of
the time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..config import SamplingConfig
from ..errors import GrammarError, RequestError, TokenError
from ..logits import check_finite, exponentials, top_k
from ..native.handles import Handle
from ..native.sampler import Candidates, Chain
from .protocol import FloatArray

__all__ = ["Sampler"]

_BLOCK = 256
_DEEPEST = 256  # groups within groups in a grammar
_MOST_RULES = 8192
# texts and character classes, in which parentheses group nothing, then parentheses
_REPEATS = re.compile(r"\{\s*([0-9]{0,9})\s*,\s*([0-9]{1,9})\s*\}")
_GROUPING = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|[()]')


class Sampler:
    """Draws one candidate's tokens.

    Args:
        config: what to do.
        model: whose vocabulary grammars and DRY need.
        n_vocab: size of the vocabulary.
        n_ctx: length of the context, which "the whole context" means for penalties and DRY.
        prompt: tokens that penalties and DRY see as history.

    Raises:
        GrammarError: the grammar does not parse.
        TokenError: ``logit_bias`` names a token outside the vocabulary.
    """

    def __init__(
        self,
        config: SamplingConfig,
        model: Handle,
        n_vocab: int,
        n_ctx: int = 4096,
        prompt: Sequence[int] = (),
    ) -> None:
        self.config = config
        self._n_vocab = n_vocab
        for token in config.logit_bias:
            if token >= n_vocab:
                raise TokenError(token, n_vocab)
        self._grammar = _grammar(config, model)
        self._history = Chain()
        _add_history(self._history, config, model, n_vocab, n_ctx)
        self._truncation = Chain()
        self._vectorised = not _needs_chain(config)
        if not self._vectorised:
            _add_truncation(self._truncation, config, n_vocab)
        self._candidates: Candidates | None = None
        self._sampled: int | None = None
        if self._history.size:
            for token in prompt:
                self._check_token(token)
                self._history.accept(token)

    def sample(self, logits: FloatArray, draw: float) -> int:
        """The next token id from logits [n_vocab] (unchanged) and a uniform number in [0, 1).

        Raises:
            LogitsError: NaN, +inf or no finite value.
            GrammarError: the grammar allows no token here.
            RequestError: ``logit_bias`` forbids all that is allowed; the logits are not of this vocabulary.
        """
        if logits.shape != (self._n_vocab,):
            raise RequestError(f"logits have the shape ({self._n_vocab},), not {logits.shape}")
        check_finite(logits)
        # as llama.cpp's own tools do: draw first, and only ask the grammar about every token if it objects
        token = self._draw(logits, draw, None)
        if self._grammar is not None and not self._allowed(token):
            token = self._draw(logits, draw, self._grammar)
        self._sampled = token
        return token

    def accept(self, token: int) -> None:
        """Note a token of the text: penalties, DRY, mirostat and the grammar follow it.

        Raises:
            TokenError: the id is out of range.
            GrammarError: the grammar does not allow the token (on which llama.cpp would abort).
        """
        self._check_token(token)
        if self._grammar is not None and token != self._sampled and not self._allowed(token):
            raise GrammarError(self.config.grammar or "", f"it does not allow token {token} here")
        self._sampled = None
        if self._history.size:
            self._history.accept(token)
        if self._truncation.size:
            self._truncation.accept(token)
        if self._grammar is not None:
            self._grammar.accept(token)

    def close(self) -> None:
        """Free what llama.cpp holds; idempotent."""
        for chain in (self._grammar, self._history, self._truncation):
            if chain is not None:
                chain.close()

    def _check_token(self, token: int) -> None:
        if not isinstance(token, (int, np.integer)) or not 0 <= token < self._n_vocab:
            raise TokenError(token, self._n_vocab)

    def _load(self) -> Candidates:
        if self._candidates is None:
            self._candidates = Candidates(self._n_vocab)
        return self._candidates

    def _allowed(self, token: int) -> bool:
        assert self._grammar is not None
        candidates = self._load()
        candidates.load_one(token)
        candidates.apply(self._grammar)
        return bool(candidates.left["logit"][0] > -np.inf)

    def _draw(self, logits: FloatArray, draw: float, grammar: Chain | None) -> int:
        if grammar is None and not self._history.size and self._vectorised:
            return _draw_vectorised(self.config, logits, draw)
        candidates = self._load()
        candidates.load(logits)
        if grammar is not None:
            candidates.apply(grammar)
            if not np.isfinite(candidates.left["logit"].max()):
                raise GrammarError(self.config.grammar or "", "it allows no token here")
        if self._history.size:
            candidates.apply(self._history)
            if candidates.left["logit"].max() == -np.inf:
                raise RequestError("no token is left to sample: logit_bias forbids all that is allowed here")
        if self._vectorised:
            return _draw_vectorised(self.config, candidates.left["logit"], draw)
        candidates.apply(self._truncation)
        selected = candidates.selected
        if selected is not None:  # mirostat has drawn already
            return selected
        left = candidates.left
        return int(left["id"][_inverse_cdf(exponentials(left["logit"]), draw)])


def _needs_chain(config: SamplingConfig) -> bool:
    """Whether llama.cpp must truncate: anything but temperature, top-k, top-p and min-p."""
    if config.greedy:
        return False
    return bool(
        config.mirostat
        or config.typical_p < 1
        or config.top_n_sigma > 0
        or config.dynatemp_range > 0
        or config.xtc_probability > 0
    )


def _grammar(config: SamplingConfig, model: Handle) -> Chain | None:
    if config.grammar is None:
        return None
    if "\0" in config.grammar or "\0" in config.grammar_root:
        raise GrammarError(config.grammar, "it holds a NUL character")
    _check_size(config.grammar)
    chain = Chain()
    if not config.grammar.strip() or not chain.grammar(model, config.grammar, config.grammar_root):
        chain.close()
        raise GrammarError(
            config.grammar, f"it does not parse as GBNF with the root rule {config.grammar_root!r}"
        )
    return chain


def _check_size(grammar: str) -> None:
    """llama.cpp parses groups and follows rules by recursion: refuse what overflows the stack."""
    try:
        grammar.encode()
    except UnicodeEncodeError:
        raise GrammarError(grammar, "it holds a lone surrogate") from None
    depth = deepest = 0
    for match in _GROUPING.finditer(grammar):
        depth += (match[0] == "(") - (match[0] == ")")
        deepest = max(deepest, depth)
    if deepest > _DEEPEST:
        raise GrammarError(grammar, f"its groups are nested {deepest} deep; at most {_DEEPEST} are allowed")
    for low, high in _REPEATS.findall(grammar):
        if high and int(low or 0) > int(high):
            raise GrammarError(grammar, f"it repeats {{{low},{high}}}: at least more than at most")
    rules = grammar.count("::=")
    if rules > _MOST_RULES:
        raise GrammarError(grammar, f"it has {rules} rules; at most {_MOST_RULES} are allowed")


def _add_history(chain: Chain, config: SamplingConfig, model: Handle, n_vocab: int, n_ctx: int) -> None:
    """The samplers that change logits by the text so far, or by wish."""
    if config.logit_bias:
        chain.logit_bias(n_vocab, config.logit_bias)
    repeats = config.repeat_penalty != 1 or config.frequency_penalty or config.presence_penalty
    if repeats and config.penalty_last_n:
        last_n = _window(config.penalty_last_n, n_ctx)
        chain.penalties(
            n_vocab, last_n, config.repeat_penalty, config.frequency_penalty, config.presence_penalty
        )
    if config.dry_multiplier:
        chain.dry(
            model,
            config.dry_multiplier,
            config.dry_base,
            config.dry_allowed_length,
            _window(config.dry_penalty_last_n, n_ctx),
            config.dry_sequence_breakers,
        )


def _window(last_n: int, n_ctx: int) -> int:
    """llama.cpp allocates the window: no longer a one than there can be tokens."""
    return n_ctx if last_n < 0 else min(last_n, n_ctx)


def _add_truncation(chain: Chain, config: SamplingConfig, n_vocab: int) -> None:
    """llama.cpp's default order (common_params_sampling)."""
    seed = 0 if config.seed is None else config.seed
    if config.mirostat:
        chain.temperature(config.temperature, 0.0, 1.0)
        chain.mirostat(config.mirostat, n_vocab, seed, config.mirostat_tau, config.mirostat_eta)
        return
    keep = config.min_keep
    if config.top_n_sigma > 0:
        chain.top_n_sigma(config.top_n_sigma)
    if config.top_k > 0:
        chain.top_k(config.top_k)
    if config.typical_p < 1:
        chain.typical(config.typical_p, keep)
    if config.top_p < 1:
        chain.top_p(config.top_p, keep)
    if config.min_p > 0:
        chain.min_p(config.min_p, keep)
    if config.xtc_probability > 0:
        chain.xtc(config.xtc_probability, config.xtc_threshold, keep, seed)
    chain.temperature(config.temperature, config.dynatemp_range, config.dynatemp_exponent)


# ------------------------------------------------------------------------ temperature, top-k, top-p, min-p


def _draw_vectorised(config: SamplingConfig, logits: FloatArray, draw: float) -> int:
    if config.temperature == 0:
        return int(logits.argmax())
    kept = _truncate(config, logits)
    chosen = logits if kept is None else logits[kept]
    index = _inverse_cdf(exponentials(chosen, config.temperature), draw)
    return int(index if kept is None else kept[index])


def _truncate(config: SamplingConfig, logits: FloatArray) -> NDArray[np.intp] | None:
    """Indices that top-k, top-p and min-p leave, most probable first; None for all of them."""
    kept: NDArray[np.intp] | None = None
    keep_at_least = max(config.min_keep, 1)
    if 0 < config.top_k < logits.size:
        kept = top_k(logits, max(config.top_k, config.min_keep))
    if config.top_p < 1:
        if kept is None:
            kept, probabilities = _enough_mass(logits, config.top_p, keep_at_least)
        else:
            weights = exponentials(logits[kept])
            probabilities = weights / weights.sum()
        n = int(np.searchsorted(np.cumsum(probabilities, dtype=np.float64), config.top_p)) + 1
        kept = kept[: max(n, keep_at_least)]
    if config.min_p > 0:
        peak = logits.max() if kept is None else logits[kept[0]]
        floor = peak + np.log(np.float32(config.min_p))
        if kept is None:
            kept = np.flatnonzero(logits >= floor)
            if len(kept) < keep_at_least:
                kept = top_k(logits, keep_at_least)
        else:
            n = int((logits[kept] >= floor).sum())
            kept = kept[: max(n, keep_at_least)]
    return kept


def _enough_mass(logits: FloatArray, mass: float, at_least: int) -> tuple[NDArray[np.intp], FloatArray]:
    """The most probable tokens, sorted, that hold ``mass`` together (or some more), and their
    probabilities among all tokens; without sorting the rest of the vocabulary."""
    peak = logits.max()
    weights = exponentials(logits)
    total = weights.sum(dtype=np.float64)
    depth = 4.0
    while True:
        chosen = np.flatnonzero(logits >= peak - depth)
        if len(chosen) >= at_least and weights[chosen].sum(dtype=np.float64) >= mass * total:
            break
        if len(chosen) == logits.size:
            break
        depth = depth * 2 if depth < 64 else np.inf
    chosen = chosen[np.argsort(-logits[chosen], kind="stable")]
    return chosen, (weights[chosen] / total).astype(np.float32)


def _inverse_cdf(weights: FloatArray, draw: float) -> int:
    """The index at which the cumulated weights pass ``draw`` of their sum.

    In two levels, so that a large vocabulary is summed and not cumulated.
    """
    n = len(weights)
    if n <= 4 * _BLOCK:
        return _pass(weights, draw * float(weights.sum(dtype=np.float64)))
    whole = n // _BLOCK * _BLOCK
    sums = weights[:whole].reshape(-1, _BLOCK).sum(axis=1).astype(np.float64)
    if whole < n:
        sums = np.append(sums, float(weights[whole:].sum()))
    target = draw * float(sums.sum())
    block = _pass(sums, target)
    start = block * _BLOCK
    rest = target - float(sums[:block].sum())
    return start + _pass(weights[start : start + _BLOCK], rest)


def _pass(weights: NDArray[np.floating], target: float) -> int:
    """First index whose cumulated weight is above target; never one of weight 0."""
    index = int(np.searchsorted(np.cumsum(weights, dtype=np.float64), target, side="right"))
    if index < len(weights):
        return index
    return int(np.flatnonzero(weights)[-1])  # rounding may leave the sum a little short
