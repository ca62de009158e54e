"""How many layers a model has, by its metadata and its tensors both."""

from __future__ import annotations

import re

from llamaherd.errors import UnsupportedFileError
from llamaherd.files.model_file import ModelFile

__all__ = ["BLOCK", "count_layers"]

BLOCK = re.compile(r"blk\.(\d{1,9})\.(.*)", re.DOTALL)
"""A tensor of a layer: its number and the rest of its name."""


def count_layers(model: ModelFile) -> int:
    """The number of layers of a GGUF model. Raises UnsupportedFileError if metadata and tensors disagree."""
    count = model.metadata.get(f"{model.architecture}.block_count")
    blocks = (BLOCK.fullmatch(name) for name in model.tensors)
    found = {int(block[1]) for block in blocks if block is not None}
    if isinstance(count, bool) or not isinstance(count, int) or found != set(range(min(count, 1 << 16))):
        raise UnsupportedFileError(
            model.path,
            f"{model.architecture}.block_count is {count!r}, but its tensors are of {len(found)} layers",
        )
    return count
