"""Run files from before GGUF: in place where their blocks are today's, repacked while loading otherwise.

No file is written. ``fast-open`` points libllama's tensors at the mapped file (or copies repacked blocks
in); ``fast-run`` puts the model as GGUF into memory that has no name in any folder and lets llama.cpp load
that, with its own repacking for the CPU.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from ..files import Contents, ModelFile, adapter_contents
from ..files.metadata import TypedValue
from ..files.model_file import Tensor
from ..files.writer import encode_header, stream_gguf
from ..native import model as native
from ..native.handles import Handle
from ..native.user_model import TensorSlot, init_from_user

__all__ = ["in_memory_adapter", "load_in_place", "load_repacked"]


def load_in_place(contents: Contents, params: Mapping[str, Any]) -> Handle | None:
    """Load with each tensor where it lies in the mapped file; what needs repacking is copied.

    The file must stay open as long as the model, which keeps a reference.
    """
    tensors = list(contents.tensors.values())
    header = encode_header(dict(contents.metadata), tensors)

    def fill(slot: TensorSlot) -> None:
        tensor = contents.tensors.get(slot.name)
        if tensor is None:
            slot.copy(_absent(slot, contents))
            return
        data = tensor.raw
        # bytes of the file stay where they are; bytes made for this call do not
        in_file = tensor is contents.stored.get(slot.name) and tensor.offset is not None
        if not (in_file and slot.point_at(data)):
            slot.copy(data)

    return init_from_user(header, fill, params, (contents,))


def _absent(slot: TensorSlot, contents: Contents) -> Any:
    """What libllama gets for an optional float32 tensor that the file does not have.

    It asks for all of an architecture's optional tensors: biases that add nothing, scales that change
    nothing, and the output head where it is the embedding.
    """
    if slot.name == "output.weight":
        return contents.tensors["token_embd.weight"].dequantize().astype(np.float32)
    ones = slot.name.endswith("scale") or "rope_freqs" in slot.name
    return np.full(slot.nbytes // 4, 1.0 if ones else 0.0, np.float32)


def load_repacked(
    contents: Contents, params: Mapping[str, Any], progress: native.Progress | None
) -> Handle | None:
    """Load through llama.cpp's own loader, from a GGUF in anonymous memory."""
    with _anonymous_gguf(dict(contents.metadata), list(contents.tensors.values())) as path:
        # without mmap: the memory is given back when the load is done
        return native.load_model(path, {"load_mode": "none", **params}, progress)


@contextlib.contextmanager
def in_memory_adapter(file: ModelFile) -> Iterator[str]:
    """A path under which llama.cpp can read a ggla adapter as GGUF, while the block lasts."""
    metadata, tensors = adapter_contents(file)
    with _anonymous_gguf(metadata, tensors) as path:
        yield path


@contextlib.contextmanager
def _anonymous_gguf(metadata: Mapping[str, TypedValue], tensors: Sequence[Tensor]) -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("llamaherd")
            file: BinaryIO = stack.enter_context(open(descriptor, "wb"))
            path = f"/proc/self/fd/{descriptor}"
        else:
            named = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".gguf"))
            file, path = named.file, named.name  # type: ignore[assignment]
        stream_gguf(file, metadata, tensors)
        file.flush()
        yield path
