"""Settings: llama.cpp's parameters by their names, and what transformers asks of a model's config."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from ..engine.parameters import split_parameters
from ..files import open as open_file
from .resolve import HUB_OPTIONS, resolve_gguf

__all__ = ["LlamaCppConfig", "LlamaCppModelConfig"]


class LlamaCppConfig:
    """llama.cpp's own parameters, for ``from_pretrained(..., quantization_config=LlamaCppConfig(...))``.

    Every field of ``llama_model_params`` and ``llama_context_params`` can be set by its name:
    ``n_ctx``, ``n_gpu_layers``, ``n_seq_max``, ``n_batch``, ``n_threads``, ``flash_attn_type``, ``type_k``,
    ``type_v``, ``kv_unified``, ``rope_freq_base``, ``offload_kqv``, ``tensor_split``, ... Enums and ggml
    types also go by name (``type_k="q8_0"``). Left out, a parameter has the backend's default.

    Raises:
        UnknownParameterError: llama.cpp has no such parameter; the nearest is named.
        InvalidParameterError: a value does not fit its parameter.
    """

    quant_method = "llama.cpp"

    def __init__(self, **parameters: Any) -> None:
        self.model_parameters, self.context_parameters = split_parameters(parameters, of="LlamaCppConfig")

    @property
    def parameters(self) -> dict[str, Any]:
        """All parameters that were set."""
        return {**self.model_parameters, **self.context_parameters}

    def replace(self, **changes: Any) -> LlamaCppConfig:
        """A copy with some parameters changed."""
        return LlamaCppConfig(**{**self.parameters, **changes})

    def to_dict(self) -> dict[str, Any]:
        """The parameters as plain data."""
        return self.parameters

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LlamaCppConfig:
        """The config of a mapping; the inverse of to_dict()."""
        return cls(**{key: value for key, value in values.items() if key != "quant_method"})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LlamaCppConfig) and self.parameters == other.parameters

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.parameters)))

    def __repr__(self) -> str:
        return f"LlamaCppConfig({', '.join(f'{k}={v!r}' for k, v in self.parameters.items())})"


class LlamaCppModelConfig(PreTrainedConfig):  # type: ignore[misc]
    """What transformers asks of a model's config, read from the GGUF file's metadata.

    ``save_pretrained`` writes it beside the file as ``config.json``; that folder then loads through
    ``AutoModelForCausalLM`` and ``AutoTokenizer``.

    Attributes:
        gguf_file: the file's path, or its name inside a saved folder.
        architecture: ``general.architecture``, e.g. ``"llama"``.
        llama_cpp: parameters of LlamaCppConfig that from_pretrained() starts from.
    """

    model_type = "llamaherd"

    def __init__(
        self,
        gguf_file: str | None = None,
        architecture: str = "",
        vocab_size: int = 0,
        hidden_size: int = 0,
        num_hidden_layers: int = 0,
        num_attention_heads: int = 0,
        num_key_value_heads: int = 0,
        max_position_embeddings: int = 0,
        llama_cpp: Mapping[str, Any] | None = None,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.gguf_file = gguf_file
        self.architecture = architecture
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.max_position_embeddings = max_position_embeddings
        self.llama_cpp = dict(llama_cpp or {})
        self.use_cache = use_cache
        super().__init__(**kwargs)

    @classmethod
    def from_pretrained(cls, name: str | PathLike[str], *, filename: str | None = None, **kwargs: Any) -> Any:
        """The config of a GGUF file, a folder with one, or a hub id and ``filename``.

        Raises:
            ModelNotFoundError, FileError: there is no such file, or it is broken.
        """
        filename = filename or kwargs.pop("gguf_file", None)
        if Path(name).is_dir() and (Path(name) / "config.json").is_file() and filename is None:
            return super().from_pretrained(name, **kwargs)
        hub = {key: kwargs.pop(key) for key in HUB_OPTIONS if key in kwargs}
        return cls.from_gguf(resolve_gguf(name, filename, **hub))

    @classmethod
    def from_gguf(cls, path: str | PathLike[str]) -> LlamaCppModelConfig:
        """The config that a GGUF file's metadata describe."""
        with open_file(path) as file:
            metadata: Mapping[str, Any] = file.metadata
            architecture = str(metadata.get("general.architecture", ""))

            def number(key: str, default: int = 0) -> int:
                value = metadata.get(f"{architecture}.{key}", default)
                return int(np.max(value)) if np.size(value) else default  # a list has one for each layer

            tokens = metadata.get("tokenizer.ggml.tokens", ())
            heads = number("attention.head_count")
            return cls(
                gguf_file=str(path),
                architecture=architecture,
                vocab_size=len(tokens),
                hidden_size=number("embedding_length"),
                num_hidden_layers=number("block_count"),
                num_attention_heads=heads,
                num_key_value_heads=number("attention.head_count_kv", heads),
                max_position_embeddings=number("context_length"),
                bos_token_id=_token(metadata.get("tokenizer.ggml.bos_token_id")),
                eos_token_id=_token(metadata.get("tokenizer.ggml.eos_token_id")),
                pad_token_id=_token(metadata.get("tokenizer.ggml.padding_token_id")),
            )


def _token(value: Any) -> int | None:
    return None if value is None else int(value)
