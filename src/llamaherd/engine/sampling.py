"""From a request's settings to the sampler of a candidate."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import SamplingConfig
from .guidance import GuidedSampler
from .model import Model
from .protocol import TokenSampler
from .sampler import Sampler

__all__ = ["make_sampler"]


def make_sampler(
    model: Model, config: SamplingConfig, n_ctx: int, prompt: Sequence[int] = ()
) -> TokenSampler:
    """A sampler for one candidate whose text begins with ``prompt``.

    Raises:
        GrammarError: the grammar or JSON schema is not valid.
        TokenError: ``logit_bias`` names a token outside the vocabulary.
    """
    n_vocab = model.vocabulary.n_tokens
    if config.json_schema is None:
        return Sampler(config, model.handle, n_vocab, n_ctx, prompt)
    matcher = model.guide.matcher(config.json_schema)
    sampler = Sampler(config, model.handle, n_vocab, n_ctx, prompt)
    return GuidedSampler(sampler, matcher, n_vocab, config.json_schema)
