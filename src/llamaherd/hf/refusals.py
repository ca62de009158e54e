"""What a torch model can and this one cannot do: each is refused with what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ..errors import UnsupportedError

__all__ = ["RefusalMixin"]

_PLACEMENT = (
    "the weights are in llama.cpp; choose where when loading: "
    "from_pretrained(..., quantization_config=LlamaCppConfig(n_gpu_layers=..., tensor_split=...))"
)
_PRECISION = "the weights have the precision of their file; load a file of another quantisation"


class RefusalMixin:
    """Refuses what would otherwise fail silently, or far from the cause."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Stay on the CPU in float32 (which is where logits are); anything else is refused.

        Raises:
            UnsupportedError: another device or dtype was asked for.
        """
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type != "cpu":
            raise UnsupportedError(f"to({str(device)!r}): {_PLACEMENT}")
        if dtype is not None and dtype != torch.float32:
            raise UnsupportedError(f"to({dtype}): {_PRECISION}")
        return self

    def cpu(self) -> Any:
        """Nothing to do: logits are on the CPU."""
        return self

    def float(self, *args: Any) -> Any:
        """Nothing to do: logits are float32."""
        return self

    def cuda(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: n_gpu_layers places layers on a GPU."""
        raise UnsupportedError(f"cuda(): {_PLACEMENT}")

    def half(self, *args: Any) -> NoReturn:
        """Refused: the file's quantisation is the precision."""
        raise UnsupportedError(f"half(): {_PRECISION}")

    def bfloat16(self, *args: Any) -> NoReturn:
        """Refused: the file's quantisation is the precision."""
        raise UnsupportedError(f"bfloat16(): {_PRECISION}")

    def train(self, mode: bool = True) -> Any:
        """Evaluation is the only mode. Raises UnsupportedError for training."""
        if mode:
            raise UnsupportedError(
                "llama.cpp does not compute gradients; train the model in torch and convert it to GGUF, or "
                "train a LoRA there and load it with load_adapter()"
            )
        return super().train(False)  # type: ignore[misc]

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: there are no gradients."""
        raise UnsupportedError("llama.cpp does not compute gradients; train the model in torch")

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the vocabulary is the file's."""
        raise UnsupportedError("the vocabulary is the file's; resize the torch model and convert it to GGUF")

    def set_input_embeddings(self, value: Any) -> NoReturn:
        """Refused: the weights are llama.cpp's."""
        raise UnsupportedError("the weights are in llama.cpp; pass inputs_embeds to change what goes in")

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the weights are llama.cpp's."""
        raise UnsupportedError(
            "the weights are in llama.cpp; save_pretrained() copies the file, llamaherd.files.open() reads it"
        )

    def generate_batch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: transformers' continuous batching manages pages of torch tensors."""
        raise UnsupportedError(
            "transformers' continuous batching needs torch's paged attention; give generate() a padded batch "
            "(padding costs nothing here), or serve requests that come and go with `llamaherd serve`"
        )

    init_continuous_batching = generate_batch
    continuous_batching_context_manager = generate_batch
