"""generate(): what this backend adds to transformers' loops, and what it refuses by name."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, GenerationMixin
from transformers.generation import GenerationMode, UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.logits_process import LogitsProcessorList

from ..errors import RequestError, UnsupportedError
from .cache import LlamaCppCache
from .decoding import contrastive_search
from .guidance import GuidanceProcessor, GuidedBranch
from .runtime import Runtime

__all__ = ["GeneratingMixin", "check_cache"]

_CACHES = {
    "quantized": "llama.cpp quantises its own cache: load with LlamaCppConfig(type_k='q8_0', type_v='q8_0')",
    "offloaded": "llama.cpp places its own cache: to keep it off the GPU load with "
    "LlamaCppConfig(offload_kqv=False)",
    "paged": "transformers' paged attention needs torch; leave cache_implementation out: a padded batch "
    "costs nothing here, and `llamaherd serve` batches requests that come and go",
}
_OURS = (None, "dynamic", "static", "hybrid", "sliding_window")  # llama.cpp's cache is all of these already


def check_cache(cache: Any, runtime: Runtime) -> LlamaCppCache:
    """The cache, if this model can use it.

    Raises:
        RequestError: it is another kind of cache, or another model's.
    """
    if not isinstance(cache, LlamaCppCache):
        raise RequestError(
            f"a {type(cache).__name__} holds torch tensors; pass none, or one made with LlamaCppCache(model)"
        )
    if cache.runtime is not runtime:
        raise RequestError("this cache belongs to another model; make one with LlamaCppCache(model)")
    return cache


class GeneratingMixin(GenerationMixin):  # type: ignore[misc]
    """transformers' GenerationMixin over llama.cpp's cache."""

    runtime: Runtime

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' ``generate``, with all its arguments and decoding modes; see its documentation.

        Beside them: ``penalty_alpha`` with ``top_k`` runs contrastive search without remote code; ``cache``
        (also under its old name ``past_key_values``) takes a LlamaCppCache or a SinkCache.

        Raises:
            UnsupportedError: a mode that llama.cpp cannot serve; the message says what to do instead.
            RequestError: the cache is not one of this model's.
            OutOfSequencesError, OutOfCellsError: no room for the batch or its beams.
        """
        if "past_key_values" in kwargs:
            kwargs.setdefault("cache", kwargs.pop("past_key_values"))
        if len(args) > len(_POSITIONAL):
            raise TypeError(f"generate() takes at most {len(_POSITIONAL)} positional arguments")
        kwargs |= dict(zip(_POSITIONAL, args, strict=False))
        config = self._settled(kwargs.get("generation_config"), kwargs)
        _refuse(config, kwargs)
        mode = config.get_generation_mode(kwargs.get("assistant_model"))
        if mode == GenerationMode.CONTRASTIVE_SEARCH and kwargs.get("custom_generate") is None:
            kwargs["custom_generate"] = contrastive_search
        return super().generate(**kwargs)

    def _settled(self, given: GenerationConfig | None, kwargs: dict[str, Any]) -> GenerationConfig:
        """The settings that decide the mode, from the call, its config and the model's."""
        settled = GenerationConfig()
        for source in (self.generation_config, given):
            if source is not None:
                for name in _DECISIVE:
                    value = getattr(source, name, None)
                    if value is not None:
                        setattr(settled, name, value)
        for name in _DECISIVE:
            if kwargs.get(name) is not None:
                setattr(settled, name, kwargs[name])
        return settled

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        cache = model_kwargs.get("cache")
        if cache is not None:
            check_cache(cache, self.runtime)
            if generation_config.cache_implementation is not None:
                raise RequestError("pass either cache or cache_implementation, not both")
            cache._is_user_defined = True
        elif generation_config.use_cache is not False:
            model_kwargs["cache"] = LlamaCppCache(self.runtime)

    def _get_logits_processor(
        self, generation_config: GenerationConfig, **kwargs: Any
    ) -> LogitsProcessorList:
        """transformers' processors; guidance runs its second branch inside the model's own decodes."""
        processors = super()._get_logits_processor(generation_config, **kwargs)
        model_kwargs = kwargs.get("model_kwargs")
        guided = [
            i
            for i, p in enumerate(processors)
            if isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor)
        ]
        if not guided or model_kwargs is None or generation_config.use_cache is False:
            return processors
        prompt, mask = kwargs.get("negative_prompt_ids"), kwargs.get("negative_prompt_attention_mask")
        if prompt is None:
            given = kwargs.get("encoder_input_ids")
            if given is None or given.ndim != 2 or given.shape[1] == 0:
                raise RequestError("guidance_scale with inputs_embeds needs negative_prompt_ids")
            prompt, mask = given[:, -1:], None
        branch = GuidedBranch(LlamaCppCache(self.runtime), prompt, mask)
        processors[guided[0]] = GuidanceProcessor(generation_config.guidance_scale, branch)
        model_kwargs["guidance"] = branch
        cache = model_kwargs.get("cache")
        if isinstance(cache, LlamaCppCache):
            cache.companions = [branch.cache]
        return processors


_POSITIONAL = (
    "inputs",
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "synced_gpus",
    "assistant_model",
    "streamer",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "custom_generate",
)
_DECISIVE = (
    "num_beams",
    "do_sample",
    "top_k",
    "penalty_alpha",
    "num_beam_groups",
    "constraints",
    "force_words_ids",
    "use_mtp",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "dola_layers",
    "guidance_scale",
    "cache_implementation",
    "output_attentions",
    "speculation_type",
)


def _refuse(config: GenerationConfig, kwargs: dict[str, Any]) -> None:
    kind = config.cache_implementation
    if kind not in _OURS:
        hint = next((text for name, text in _CACHES.items() if name in str(kind)), "leave it out")
        raise UnsupportedError(f"cache_implementation={kind!r}: {hint}")
    if config.output_attentions:
        raise UnsupportedError(
            "output_attentions: llama.cpp does not keep attention weights; output_hidden_states and "
            "output_scores work, attention weights need the torch model"
        )
    for name in ("assistant_early_exit", "use_mtp", "dola_layers"):
        if getattr(config, name, None):
            raise UnsupportedError(
                f"{name}: llama.cpp computes whole forward passes; for speed use prompt_lookup_num_tokens "
                "or an assistant_model"
            )
    assisted = kwargs.get("assistant_model") is not None or config.prompt_lookup_num_tokens is not None
    if assisted and config.guidance_scale not in (None, 1, 1.0):
        raise UnsupportedError(
            "guidance_scale cannot be verified several tokens at a time; leave out assistant_model and "
            "prompt_lookup_num_tokens"
        )
    if getattr(config, "speculation_type", None) == "dflash":
        raise UnsupportedError("speculation_type='dflash' reads torch weights; use an assistant_model")
