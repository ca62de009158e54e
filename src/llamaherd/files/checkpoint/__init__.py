"""GGUF files as transformers checkpoints, and back: needs the extra ``llamaherd[transformers]``."""

from llamaherd.files.checkpoint.exporting import DTYPES, export_torch
from llamaherd.files.checkpoint.families import FAMILIES, Family
from llamaherd.files.checkpoint.importing import import_torch

__all__ = ["DTYPES", "FAMILIES", "Family", "export_torch", "import_torch"]
