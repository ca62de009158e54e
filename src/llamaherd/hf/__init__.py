"""transformers' ``generate()``, all of it, on llama.cpp.

Importing this package registers the model with transformers' Auto classes; it needs the extra
``llamaherd[transformers]``.
"""

from __future__ import annotations

try:
    import torch as _torch
    import transformers as _transformers
except ImportError as error:
    raise ImportError(
        f"llamaherd.hf needs torch and transformers ({error}): pip install 'llamaherd[transformers]'"
    ) from error

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from .cache import LlamaCppCache
from .config import LlamaCppConfig, LlamaCppModelConfig
from .decoding import contrastive_search
from .model import LlamaCppForCausalLM
from .sink import SinkCache
from .tokenizer import LlamaCppTokenizer

__all__ = [
    "LlamaCppCache",
    "LlamaCppConfig",
    "LlamaCppForCausalLM",
    "LlamaCppModelConfig",
    "LlamaCppTokenizer",
    "SinkCache",
    "contrastive_search",
]

AutoConfig.register(LlamaCppModelConfig.model_type, LlamaCppModelConfig, exist_ok=True)
AutoModelForCausalLM.register(LlamaCppModelConfig, LlamaCppForCausalLM, exist_ok=True)
AutoTokenizer.register(LlamaCppModelConfig, tokenizer_class=LlamaCppTokenizer, exist_ok=True)

del _torch, _transformers
