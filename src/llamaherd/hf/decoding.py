"""Contrastive search (Su et al. 2022): likely tokens, but unlike what came before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from ..errors import InvalidParameterError, RequestError
from .cache import LlamaCppCache
from .step import LAST

if TYPE_CHECKING:
    from .model import LlamaCppForCausalLM

__all__ = ["contrastive_search"]


@torch.no_grad()
def contrastive_search(
    model: LlamaCppForCausalLM,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Contrastive search, for ``generate(custom_generate=contrastive_search, penalty_alpha=0.6, top_k=4)``.

    Of the ``top_k`` most probable tokens the one is taken whose probability, weighted 1 - alpha, less the
    greatest cosine similarity of its last hidden state to any before it, weighted alpha, is highest. The
    candidates are forks of the row, decoded together; ``generate(penalty_alpha=...)`` alone comes here too.

    Args:
        model: a LlamaCppForCausalLM.
        input_ids: int64 [batch, length], the prompts, padded on the left.
        logits_processor, stopping_criteria, generation_config, streamer: as generate() prepares them.
        model_kwargs: attention_mask, cache (a new or an empty one), ...

    Returns:
        int64 [batch, length + new], or a GenerateDecoderOnlyOutput if ``return_dict_in_generate``.

    Raises:
        InvalidParameterError: ``penalty_alpha`` or ``top_k`` is missing or out of range.
        RequestError: the cache already holds tokens, whose hidden states nobody has.
    """
    alpha, top_k = generation_config.penalty_alpha, generation_config.top_k
    if alpha is None or not 0 <= alpha <= 1:
        raise InvalidParameterError("penalty_alpha", alpha, "a number in [0, 1]")
    if top_k is None or top_k < 1:
        raise InvalidParameterError("top_k", top_k, "an integer >= 1")
    cache = model_kwargs.get("cache")
    cache = LlamaCppCache(model) if cache is None else cache
    if cache.get_seq_length():
        raise RequestError(
            "contrastive search compares with the hidden states of the whole text, which a cache does not "
            "hold; pass the whole text without a cache"
        )
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(input_ids)
    record = _Record(generation_config)
    pad = generation_config._pad_token_tensor
    unfinished = torch.ones(input_ids.shape[0], dtype=torch.long)
    stops_at_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)

    out = model(
        input_ids,
        attention_mask=mask,
        cache=cache,
        logits_to_keep=1,
        output_hidden_states=record.wanted_hidden or LAST,
    )
    record.hidden_states(out.hidden_states)
    logits, history = out.logits[:, -1], out.hidden_states[-1]
    seen = mask.bool()
    while True:
        scores = logits_processor(input_ids, logits.clone())
        record.step(scores, logits)
        top = torch.topk(torch.softmax(scores, dim=-1), min(top_k, scores.shape[-1]), dim=-1)
        chosen, logits, last = _choose(model, cache, top, history, seen, alpha, record)
        if stops_at_eos:
            chosen = chosen * unfinished + pad * (1 - unfinished)
        input_ids = torch.cat([input_ids, chosen[:, None]], dim=-1)
        history = torch.cat([history, last[:, None]], dim=1)
        seen = torch.cat([seen, torch.ones_like(seen[:, :1])], dim=1)
        if streamer is not None:
            streamer.put(chosen.cpu())
        unfinished = unfinished & ~stopping_criteria(input_ids, record.scores)
        if unfinished.max() == 0:
            break
    if streamer is not None:
        streamer.end()
    if not cache.is_croppable:
        return record.output(input_ids, None)  # a recurrent state that is one token ahead is of no use
    cache.crop(-1)  # as in the other modes, the last token is not in the cache
    return record.output(input_ids, cache)


def _choose(
    model: LlamaCppForCausalLM,
    cache: LlamaCppCache,
    top: Any,
    history: torch.Tensor,
    seen: torch.Tensor,
    alpha: float,
    record: _Record,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decode every candidate, keep the best: its token [batch], next logits and last hidden state."""
    rows, k = top.indices.shape
    cache.batch_repeat_interleave(k)
    out = model(top.indices.reshape(-1, 1), cache=cache, output_hidden_states=record.wanted_hidden or LAST)
    last = out.hidden_states[-1][:, -1].view(rows, k, -1)
    similarity = torch.einsum(
        "rth,rkh->rkt",
        torch.nn.functional.normalize(history, dim=-1),
        torch.nn.functional.normalize(last, dim=-1),
    )
    similarity = similarity.masked_fill(~seen[:, None], torch.finfo(similarity.dtype).min)
    best = ((1 - alpha) * top.values - alpha * similarity.amax(-1)).argmax(-1)
    flat = torch.arange(rows) * k + best
    cache.batch_select_indices(flat)
    record.hidden_states(out.hidden_states, flat)
    return top.indices.gather(1, best[:, None])[:, 0], out.logits[flat, -1], last[torch.arange(rows), best]


class _Record:
    """What generate() was asked to return beside the tokens."""

    def __init__(self, config: GenerationConfig) -> None:
        self._config = config
        self._on = bool(config.return_dict_in_generate)
        self.wanted_hidden = self._on and bool(config.output_hidden_states)
        self.scores: tuple[torch.Tensor, ...] | None = () if self._on and config.output_scores else None
        self._logits: tuple[torch.Tensor, ...] | None = () if self._on and config.output_logits else None
        self._hidden: tuple[Any, ...] = ()

    def step(self, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Note the scores a token was chosen by, and the logits they came from."""
        if self.scores is not None:
            self.scores += (scores,)
        if self._logits is not None:
            self._logits += (logits,)

    def hidden_states(self, layers: tuple[torch.Tensor, ...], rows: torch.Tensor | None = None) -> None:
        """Note a forward's hidden states (of the chosen candidates)."""
        if self.wanted_hidden:
            self._hidden += (layers if rows is None else tuple(layer[rows] for layer in layers),)

    def output(self, sequences: torch.Tensor, cache: LlamaCppCache | None) -> Any:
        """The tokens, or all that was asked for."""
        if not self._on:
            return sequences
        # the last forward was of a token that nothing follows
        hidden = self._hidden[:-1] if self.wanted_hidden else None
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=self.scores,
            logits=self._logits,
            hidden_states=hidden,
            cache=cache if self._config.use_cache else None,
        )
