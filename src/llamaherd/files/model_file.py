"""`ModelFile`: what a model file holds, whatever its container.

Shapes are in ggml's order throughout: ``shape[0]`` is the length of a row (ggml's ``ne[0]``, "columns"), so a
weight that torch calls (out, in) has shape (in, out) here. Arrays that `Tensor.dequantize` returns are in
numpy's order, the reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from llamaherd.errors import ClosedError
from llamaherd.files.block_types import BlockType
from llamaherd.files.mapped import MappedFile
from llamaherd.files.metadata import Metadata

__all__ = ["ModelFile", "Tensor"]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """One tensor of a file.

    ``shape`` is in ggml order (shape[0] = row length). ``offset`` is the absolute byte at which its data
    starts in part number ``part`` of the model's files, None if its bytes are put together from several
    places. ``nbytes`` is their number; for a type of unknown layout, the bytes up to the next tensor.
    """

    name: str
    type: BlockType
    shape: tuple[int, ...]
    nbytes: int
    load: Callable[[], Bytes] = field(repr=False)
    offset: int | None = None
    part: int = 0
    big_endian: bool = False

    @classmethod
    def from_bytes(cls, name: str, type: BlockType, shape: tuple[int, ...], raw: npt.NDArray[Any]) -> Tensor:
        """A tensor over bytes in memory. Raises ValueError if they are not what type and shape need."""
        flat = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
        if type.known and flat.nbytes != type.nbytes(shape):
            raise ValueError(
                f"{name}: {type} of shape {shape} needs {type.nbytes(shape)} bytes, got {flat.nbytes}"
            )
        return cls(name, type, tuple(shape), flat.nbytes, lambda: flat)

    @property
    def raw(self) -> Bytes:
        """The stored bytes, a flat uint8 array; a view of the mapped file wherever they lie in one piece."""
        return self.load()

    @property
    def n_elements(self) -> int:
        """The number of weights."""
        n = 1
        for dim in self.shape:
            n *= dim
        return n

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The weights as float32, shape reversed to numpy's order (rows first).

        Raises UnsupportedFileError for types that have no known decoder.
        """
        from llamaherd.files.blocks import dequantize  # gguf's tables load only when weights are read

        return dequantize(self)


class ModelFile:
    """An open model: ``metadata`` and ``tensors`` over mapped files; made by `llamaherd.files.open`.

    container: "gguf", "ggml", "ggmf", "ggjt" or "ggla". version: of the container (None: it has none).
    architecture: e.g. "llama"; None if neither the file nor the caller says. metadata: what the file
    stores, GGUF keys or a legacy header's fields. tensors: by the file's own names, in its order.
    parts: the mapped files (several for a split or multi-part model).

    A context manager; `close` may be called twice. Views taken before `close` stay valid.
    """

    def __init__(
        self,
        parts: list[MappedFile],
        *,
        container: str,
        version: int | None,
        architecture: str | None,
        metadata: Metadata,
        tensors: Mapping[str, Tensor],
        alignment: int = 32,
        big_endian: bool = False,
    ) -> None:
        self.path: Path = parts[0].path
        self.container = container
        self.version = version
        self.architecture = architecture
        self.alignment = alignment
        self.big_endian = big_endian
        self._parts = parts
        self._metadata = metadata
        self._tensors = MappingProxyType(dict(tensors))
        self._closed = False

    @property
    def metadata(self) -> Metadata:
        """The file's own metadata, parsed as it is asked for."""
        self._check_open()
        return self._metadata

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The file's tensors by name, in the file's order."""
        self._check_open()
        return self._tensors

    @property
    def parts(self) -> tuple[MappedFile, ...]:
        """The mapped files of this model."""
        self._check_open()
        return tuple(self._parts)

    @property
    def nbytes(self) -> int:
        """The size of all parts together."""
        return sum(part.size for part in self.parts)

    @property
    def n_parameters(self) -> int:
        """The number of weights in all tensors."""
        return sum(tensor.n_elements for tensor in self.tensors.values())

    @property
    def container_name(self) -> str:
        """Container and version as one word, e.g. "gguf-3", "ggjt-1", "ggml"."""
        return self.container if self.version is None else f"{self.container}-{self.version}"

    def close(self) -> None:
        """Let go of the mapping; it is unmapped when the last view of it is gone."""
        self._closed = True
        self._parts = []
        self._metadata = Metadata({})
        self._tensors = MappingProxyType({})

    def __enter__(self) -> ModelFile:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._tensors)} tensors"
        return f"<ModelFile {str(self.path)!r} {self.container_name} {self.architecture} {state}>"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("model file")
