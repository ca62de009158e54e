"""A GGUF file's hyperparameters, one by one and checked."""

from __future__ import annotations

import numpy as np

from llamaherd.errors import UnsupportedFileError
from llamaherd.files.checkpoint.families import Family
from llamaherd.files.metadata import Value
from llamaherd.files.model_file import ModelFile

__all__ = ["Getter"]


class Getter:
    """Hyperparameters by their key after the architecture's prefix."""

    def __init__(self, model: ModelFile, family: Family) -> None:
        self.model = model
        self.prefix = family.gguf

    def __call__(self, key: str, default: Value | None = None) -> Value | None:
        """The value as it is stored."""
        return self.model.metadata.get(f"{self.prefix}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive number. Raises UnsupportedFileError for anything else."""
        value = self(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnsupportedFileError(
                self.model.path, f"{self.prefix}.{key} is {value!r}; a checkpoint needs one positive number"
            )
        return value

    def head_length(self) -> int:
        """The length of an attention head, at least 1."""
        stated = self("attention.key_length")
        heads = self.integer("attention.head_count")
        length = stated if isinstance(stated, int) else self.integer("embedding_length") // heads
        if length < 1:
            raise UnsupportedFileError(self.model.path, f"{heads} attention heads leave none any length")
        return length

    def real(self, key: str, default: float | None = None) -> float:
        """A number, in the shortest digits that give its float32."""
        value = self(key, default)
        if not isinstance(value, (int, float)):
            raise UnsupportedFileError(self.model.path, f"{self.prefix}.{key} is {value!r}, not a number")
        return float(str(np.float32(value)))  # 1e-05, and not its float32 neighbour's digits
