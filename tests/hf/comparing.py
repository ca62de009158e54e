"""Comparing two models' tokens: equal, or different only where the two candidates are as good as equal."""

from __future__ import annotations

from typing import Any

import torch

TIE = 1e-3


def next_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The logits [n_vocab] after tokens [length]."""
    with torch.no_grad():
        logits: torch.Tensor = model(tokens[None], logits_to_keep=1).logits[0, -1].float()
    return logits


def same_tokens(ours: torch.Tensor, theirs: torch.Tensor, models: tuple[Any, Any], tie: float = TIE) -> bool:
    """Whether two rows of tokens [length] are equal; fails unless a difference is a tie in both models."""
    n = min(len(ours), len(theirs))
    differing = (ours[:n] != theirs[:n]).nonzero()
    if not len(differing):
        assert len(ours) == len(theirs)
        return True
    at = int(differing[0])
    gaps = []
    for model in models:
        logits = next_logits(model, theirs[:at])
        gaps.append(abs(float(logits[ours[at]] - logits[theirs[at]])))
    assert max(gaps) < tie, f"tokens differ at {at} ({ours[at]} and {theirs[at]}), logit gaps {gaps}"
    return False
