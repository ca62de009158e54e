"""A transformers causal language model whose forward pass and KV cache are llama.cpp's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..engine.model import Model
from ..errors import RequestError, UnknownParameterError, UnsupportedError
from .adapters import AdapterMixin
from .cache import LlamaCppCache
from .config import LlamaCppConfig, LlamaCppModelConfig
from .embeddings import input_embeddings
from .generating import GeneratingMixin, check_cache
from .guidance import GuidedBranch
from .packing import Columns, kept_columns, new_mask
from .refusals import RefusalMixin
from .resolve import HUB_OPTIONS, resolve_gguf
from .runtime import Runtime
from .step import LAST, Pass, run_passes

__all__ = ["LlamaCppForCausalLM"]

_IGNORED = (
    "trust_remote_code",
    "code_revision",
    "low_cpu_mem_usage",
    "use_safetensors",
    "weights_only",
    "state_dict",
    "adapter_kwargs",
)
_SETTLED = ("device_map", "dtype", "torch_dtype", "attn_implementation")
_UNUSED = ("token_type_ids", "cache_position", "num_items_in_batch", "tokenizer", "assistant_tokenizer")
_MODEL_FILE = "model.gguf"


class LlamaCppForCausalLM(AdapterMixin, RefusalMixin, GeneratingMixin, PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A GGUF model for everything that takes a transformers causal language model.

    Make one with from_pretrained(). ``generate`` and calls work as with a torch model; several caches and
    several threads may use one model, whose decodes are serialised. Logits are float32 on the CPU.

    Attributes:
        runtime: the engine's model and context.
        llama_cpp: the parameters it was loaded with.
    """

    config_class = LlamaCppModelConfig
    main_input_name = "input_ids"
    base_model_prefix = "model"
    _is_stateful = False
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def __init__(self, config: LlamaCppModelConfig, runtime: Runtime | None = None) -> None:
        if runtime is None:
            raise UnsupportedError("a model needs its file: use LlamaCppForCausalLM.from_pretrained(path)")
        super().__init__(config)
        self.runtime = runtime
        self.llama_cpp = LlamaCppConfig(**config.llama_cpp)
        self.hf_device_map = {"": torch.device("cpu")}  # pipelines then leave it where it is
        self._adapters = {}
        self._adapters_on = True
        self._embeddings: torch.nn.Embedding | None = None
        vocabulary = runtime.model.vocabulary
        self.generation_config = GenerationConfig(
            bos_token_id=vocabulary.bos,
            eos_token_id=sorted(vocabulary.end_tokens) or None,
            pad_token_id=vocabulary.pad if vocabulary.pad is not None else vocabulary.eos,
        )
        self.eval()

    # ------------------------------------------------------------------------------- loading

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | PathLike[str],
        *,
        filename: str | None = None,
        quantization_config: LlamaCppConfig | Mapping[str, Any] | None = None,
        layer_outputs: bool = False,
        config: LlamaCppModelConfig | None = None,
        generation_config: GenerationConfig | None = None,
        **kwargs: Any,
    ) -> LlamaCppForCausalLM:
        """Load a model by mapping its file; milliseconds, not a conversion.

        Args:
            pretrained_model_name_or_path: a GGUF file, a folder with one (also one that save_pretrained()
                wrote), or a hub id.
            filename: the file in that folder or repository (also under transformers' name ``gguf_file``).
            quantization_config: llama.cpp's parameters by name. They can be given as keywords here as well
                (``n_ctx=8192``).
            layer_outputs: make hidden states of all layers available from the start; else that happens
                when they are first asked for.
            config, generation_config: in place of those the file implies.
            kwargs: huggingface_hub's ``revision``, ``cache_dir``, ``token``, ``local_files_only``, ...; and
                llama.cpp's parameters.

        Raises:
            ModelNotFoundError, FileError, ModelLoadError: the file is missing, broken or not supported.
            UnknownParameterError, InvalidParameterError: a parameter is.
            UnsupportedError: a dtype or device was asked for, which are llama.cpp's parameters here.
        """
        filename = filename or kwargs.pop("gguf_file", None)
        hub = {key: kwargs.pop(key) for key in HUB_OPTIONS if key in kwargs}
        _drop_settled(kwargs)
        path = resolve_gguf(pretrained_model_name_or_path, filename, **hub)
        folder = Path(pretrained_model_name_or_path)
        if config is None:
            saved = folder.is_dir() and (folder / "config.json").is_file()
            config = (
                LlamaCppModelConfig.from_pretrained(folder) if saved else LlamaCppModelConfig.from_gguf(path)
            )
        parameters = _parameters(config, quantization_config, kwargs)
        model = Model.load(path, **parameters.model_parameters)
        try:
            runtime = Runtime(model, parameters.context_parameters, layer_outputs=layer_outputs)
        except BaseException:
            model.close()
            raise
        config.gguf_file, config.llama_cpp = str(path), parameters.parameters
        config.vocab_size, config.hidden_size = model.vocabulary.n_tokens, model.n_embd
        config.name_or_path = str(pretrained_model_name_or_path)
        result = cls(config, runtime)
        if generation_config is None and folder.is_dir() and (folder / "generation_config.json").is_file():
            generation_config = GenerationConfig.from_pretrained(folder)
        if generation_config is not None:
            result.generation_config = generation_config
        return result

    def save_pretrained(self, save_directory: str | PathLike[str], **kwargs: Any) -> None:
        """Write a folder that from_pretrained() and the Auto classes load: the GGUF file and two configs.

        The file is linked where the file system can, else copied.

        Raises:
            UnknownParameterError: options that are about torch weights.
        """
        for name in kwargs:
            if name not in (
                "safe_serialization",
                "max_shard_size",
                "is_main_process",
                "token",
                "push_to_hub",
            ):
                raise UnknownParameterError(name, ("save_directory",), of="save_pretrained")
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / _MODEL_FILE
        source = Path(self.runtime.model.path).resolve()
        if not (target.exists() and target.resolve() == source):
            target.unlink(missing_ok=True)
            try:
                os.link(source, target)
            except OSError:
                shutil.copyfile(source, target)
        before = self.config.gguf_file
        self.config.gguf_file, self.config.architectures = _MODEL_FILE, [type(self).__name__]
        try:
            self.config.save_pretrained(folder)
        finally:
            self.config.gguf_file = before
        self.generation_config.save_pretrained(folder)

    def close(self) -> None:
        """Free the model and its caches now; idempotent. Without it, garbage collection does."""
        self.runtime.close()

    # --------------------------------------------------------------------------------- facts

    @property
    def device(self) -> torch.device:
        """The CPU: where logits are. llama.cpp's own devices are set by n_gpu_layers."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """float32: what logits are."""
        return torch.float32

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Weights in the file; none are trainable."""
        return 0 if only_trainable else self.runtime.model.n_params

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of the weights."""
        return self.runtime.model.size

    def get_input_embeddings(self) -> torch.nn.Embedding:
        """The token embeddings as a frozen torch module, read from the file when first asked for.

        float32 [n_vocab, hidden]: what it gives for tokens, passed as ``inputs_embeds``, equals the tokens.
        """
        if self._embeddings is None:
            # outside the module's registry: it is a copy, not a parameter of this model
            object.__setattr__(self, "_embeddings", input_embeddings(self.runtime.model.path))
        assert self._embeddings is not None
        return self._embeddings

    def get_output_embeddings(self) -> None:
        """None: the output head is llama.cpp's."""

    # ------------------------------------------------------------------------------- forward

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: LlamaCppCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        output_hidden_states: bool | str | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        guidance: GuidedBranch | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """One forward pass; see transformers' causal language models for the arguments.

        Args:
            input_ids: int64 [batch, columns], the tokens after the cached ones.
            attention_mask: [batch, cached + columns] or [batch, columns], 0 at padding. Padding is not
                computed: its logits and hidden states are 0.
            position_ids: must count the tokens of each row, as llama.cpp does; they are only checked.
            cache: a LlamaCppCache, which gains the columns; one row serves a whole batch.
            inputs_embeds: float32 [batch, columns, hidden] in place of input_ids.
            labels: int64 [batch, columns] for the loss; -100 is left out, and so is padding.
            logits_to_keep: 0 for all columns, n for the last n, or indices; only they are computed.
            output_hidden_states: True for all layers (embeddings, each layer, the last one normed), "last"
                for the last one alone, which is cheaper.

        Returns:
            logits float32 [batch, kept columns, n_vocab]; cache (unless ``use_cache=False``); hidden_states,
            each float32 [batch, columns, hidden]; loss.

        Raises:
            TokenError, PositionError, RequestError: the input is not valid; the cache is as before.
            OutOfSequencesError, OutOfCellsError: no room; the cache is as before.
            UnsupportedError: attention weights, 4-D masks.
        """
        cache = kwargs.pop("past_key_values", None) if cache is None else cache
        _refuse_unknown(output_attentions, kwargs)
        if output_hidden_states is None:
            output_hidden_states = bool(self.config.output_hidden_states)
        if output_hidden_states and output_hidden_states != LAST:
            self.runtime.use_layer_outputs()
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None or (input_ids is not None and inputs_embeds is not None):
            raise RequestError("pass either input_ids or inputs_embeds")
        rows, count = int(given.shape[0]), int(given.shape[1])
        use_cache = self.config.use_cache if use_cache is None else use_cache
        runtime = self.runtime
        with runtime.lock:
            own = cache is None
            cache = LlamaCppCache(runtime) if cache is None else check_cache(cache, runtime)
            if cache.batch_size == 1 and rows > 1:
                cache.batch_repeat_interleave(rows)
            if cache.is_initialized and cache.batch_size != rows:
                raise RequestError(f"the cache has {cache.batch_size} rows, the input has {rows}")
            mask = new_mask(attention_mask, cache, rows, count)
            _check_positions(position_ids, cache, mask)
            columns = _columns(input_ids, inputs_embeds, mask)
            keep = kept_columns(0 if labels is not None else logits_to_keep, count)
            layers = _wanted_layers(output_hidden_states, runtime.model.n_layer, inputs_embeds is None)
            one = Pass(cache, columns, keep, layers, last=bool(output_hidden_states))
            other = None if guidance is None else guidance.next_pass(input_ids, rows)
            run_passes(runtime, [one] if other is None else [one, other])
            if guidance is not None and other is not None:
                guidance.done(other)
            if own and not use_cache:
                cache.drop_rows()
        loss = None
        if labels is not None:
            loss = self._loss(one.logits, labels, mask)
            if not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
                one.logits = one.logits[:, torch.from_numpy(kept_columns(logits_to_keep, count))]
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=one.logits.to(given.device),
            cache=cache if use_cache else None,
            hidden_states=_hidden_states(one, inputs_embeds),
        )
        return output.to_tuple() if return_dict is False else output

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor, mask: np.ndarray[Any, Any]) -> torch.Tensor:
        """Mean negative log-likelihood of the labels after each column, padding left out."""
        tokens = torch.from_numpy(mask)
        wanted = labels.cpu().masked_fill(~tokens, -100)
        # what follows padding would be predicted from nothing
        wanted[:, 1:] = wanted[:, 1:].masked_fill(~tokens[:, :-1], -100)
        loss: torch.Tensor = self.loss_function(
            logits=logits, labels=wanted, vocab_size=self.config.vocab_size
        )
        return loss


def _drop_settled(kwargs: dict[str, Any]) -> None:
    """Take transformers' own keywords out; refuse those that would be silently ignored."""
    for name in [name for name in kwargs if name in _IGNORED or name.startswith("_")]:
        del kwargs[name]
    for name in _SETTLED:
        value = kwargs.pop(name, None)
        if value in (None, "auto", "cpu", torch.float32, "float32", "sdpa", "eager") or str(value) == "cpu":
            continue
        raise UnsupportedError(
            f"{name}={value!r}: llama.cpp decides that by its own parameters: the file's quantisation, "
            "n_gpu_layers, type_k and type_v, flash_attn_type (see LlamaCppConfig)"
        )


def _parameters(
    config: LlamaCppModelConfig,
    given: LlamaCppConfig | Mapping[str, Any] | None,
    keywords: Mapping[str, Any],
) -> LlamaCppConfig:
    if isinstance(given, Mapping):
        given = LlamaCppConfig.from_dict(given)
    if given is not None and not isinstance(given, LlamaCppConfig):
        raise UnsupportedError(
            f"quantization_config={type(given).__name__}: pass a LlamaCppConfig; the file is quantised"
        )
    return LlamaCppConfig(**{**config.llama_cpp, **(given.parameters if given else {}), **keywords})


def _refuse_unknown(output_attentions: bool | None, kwargs: Mapping[str, Any]) -> None:
    if output_attentions:
        raise UnsupportedError(
            "output_attentions: llama.cpp does not keep attention weights; take them from the torch model"
        )
    for name, value in kwargs.items():
        if value is not None and name not in _UNUSED:
            known = ("input_ids", "attention_mask", "position_ids", "cache", "inputs_embeds", "labels")
            raise UnknownParameterError(name, known, of="forward")


def _check_positions(
    position_ids: torch.Tensor | None, cache: LlamaCppCache, mask: np.ndarray[Any, Any]
) -> None:
    """Positions count the tokens of a row; others would be silently computed as these."""
    if position_ids is None:
        return
    given = position_ids.cpu().numpy()
    if given.ndim != 2 or given.shape[1] != mask.shape[1] or given.shape[0] not in (1, mask.shape[0]):
        raise RequestError(f"position_ids has the shape {given.shape}, the input {mask.shape}")
    expected = cache.n_tokens[:, None] + np.cumsum(mask, axis=1) - 1 if cache.is_initialized else None
    if expected is None:
        expected = np.cumsum(mask, axis=1) - 1
    wrong = mask & (given != expected)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        found = np.broadcast_to(given, mask.shape)[row, column]
        raise RequestError(
            f"position_ids[{row}, {column}] is {found}, the row goes on at {expected[row, column]}: llama.cpp"
            " counts tokens one by one; leave position_ids out"
        )


def _columns(
    input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None, mask: np.ndarray[Any, Any]
) -> Columns:
    if input_ids is not None:
        return Columns(input_ids.to("cpu", torch.int32).numpy(), None, mask)
    assert inputs_embeds is not None
    return Columns(None, inputs_embeds.detach().to("cpu", torch.float32).numpy(), mask)


def _wanted_layers(output_hidden_states: bool | str, n_layer: int, embeds: bool) -> tuple[int, ...]:
    """Layers wanted below the last, which is normed; -1, the embeddings, if they are ours."""
    if not output_hidden_states or output_hidden_states == LAST:
        return ()
    return tuple(range(-1 if embeds else 0, n_layer - 1))


def _hidden_states(one: Pass, inputs_embeds: torch.Tensor | None) -> tuple[torch.Tensor, ...] | None:
    if not one.wants_hidden:
        return None
    found = tuple(one.hidden[layer] for layer in one.hidden_names)
    if not one.layers or inputs_embeds is None:
        return found
    return inputs_embeds.detach().to("cpu", torch.float32), *found
