"""Classifier-free guidance with both branches in one decode (Sanchez et al. 2023)."""

from __future__ import annotations

import numpy as np
import torch
from transformers import LogitsProcessor

from ..errors import RequestError
from .cache import LlamaCppCache
from .packing import Columns
from .step import Pass

__all__ = ["GuidanceProcessor", "GuidedBranch"]


class GuidedBranch:
    """The unconditional (or negative) branch of one generation: its cache, and its logits when it has run.

    The model's forward takes it along: first its prompt, then each token that the conditional rows gain.

    Args:
        cache: an empty one.
        prompt: int [1 or batch, length], the negative prompt.
        mask: its attention mask.
    """

    def __init__(self, cache: LlamaCppCache, prompt: torch.Tensor, mask: torch.Tensor | None) -> None:
        self.cache = cache
        self._prompt = prompt
        self._mask = mask
        self._due = True  # its logits are used up: the next forward runs it
        self.logits: torch.Tensor | None = None

    def next_pass(self, input_ids: torch.Tensor | None, rows: int) -> Pass | None:
        """What it takes in beside conditional rows, which take in input_ids (None: embeddings)."""
        if not self._due:
            return None
        if not self.cache.is_initialized:
            tokens, mask = self._first(rows)
        elif input_ids is not None:
            tokens, mask = input_ids[:, -1:], None
        else:
            raise RequestError("the guided branch goes on with tokens, not with embeddings")
        shape = (rows, int(tokens.shape[1]))
        known = np.ones(shape, np.bool_) if mask is None else mask.to("cpu", torch.bool).numpy()
        columns = Columns(tokens.to("cpu", torch.int32).numpy(), None, known)
        keep = np.zeros(tokens.shape[1], np.bool_)
        keep[-1] = True
        return Pass(self.cache, columns, keep)

    def _first(self, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        given = self._prompt.shape[0]
        if rows % given:
            raise RequestError(f"negative_prompt_ids has {given} rows, the batch has {rows}")
        mask = None if self._mask is None else self._mask.repeat_interleave(rows // given, 0)
        return self._prompt.repeat_interleave(rows // given, 0), mask

    def done(self, one: Pass) -> None:
        """Take the results of its pass."""
        self.logits = one.logits[:, -1]
        self._due = False

    def take(self) -> torch.Tensor:
        """Its logits [batch, n_vocab] for the token to be chosen now."""
        if self.logits is None:
            raise RequestError("the guided branch has not run; guidance works in generate() only")
        self._due = True
        return self.logits


class GuidanceProcessor(LogitsProcessor):  # type: ignore[misc]
    """scores = uncond + scale * (cond - uncond), in log-probabilities, as transformers' processor does."""

    def __init__(self, guidance_scale: float, branch: GuidedBranch) -> None:
        self.guidance_scale = guidance_scale
        self.branch = branch

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Guided scores [batch, n_vocab]."""
        scores = torch.log_softmax(scores, dim=-1)
        unconditional = torch.log_softmax(self.branch.take().to(scores.device), dim=-1)
        return self.guidance_scale * (scores - unconditional) + unconditional
