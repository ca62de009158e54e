"""A transformers checkpoint to GGUF."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llamaherd.errors import FileError, InvalidParameterError, UnsupportedFileError
from llamaherd.files.block_types import BlockType, block_type, named_type
from llamaherd.files.blocks import encode_floats
from llamaherd.files.checkpoint.config import REQUIRED_SETTINGS, metadata_of_config
from llamaherd.files.checkpoint.exporting import KEPT_METADATA
from llamaherd.files.checkpoint.extras import require_extra
from llamaherd.files.checkpoint.families import Family, Heads, family_of_model_type
from llamaherd.files.checkpoint.rotary import rope_tensors
from llamaherd.files.checkpoint.tokenizer import tokenizer_metadata
from llamaherd.files.metadata import TypedValue, Value
from llamaherd.files.model_file import Bytes, Tensor
from llamaherd.files.opening import open_model
from llamaherd.files.writer import Progress, write_gguf

__all__ = ["import_torch"]

Floats = npt.NDArray[np.float32]

_FLOATS = {"f32": 0, "f16": 1, "bf16": 32}  # llama_ftype
_COMPUTED = ("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")  # old checkpoints store them


def import_torch(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    type: str = "f16",
    metadata_from: str | os.PathLike[str] | None = None,
    split_size: int | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Write the transformers checkpoint in ``folder`` as GGUF and return the files' paths.

    type: "f32", "f16" or "bf16" for the matrices; vectors are f32. The tokenizer and general metadata come
    from ``metadata_from`` (a GGUF), else from what `export_torch` left in the folder, else from
    ``tokenizer.json``. Weights are read one at a time.

    Needs torch and safetensors. Raises InvalidParameterError (model type, ``type``), UnsupportedFileError
    (weights or settings that llama.cpp has no place for), FileError (missing files).
    """
    require_extra("torch", "safetensors")
    if type not in _FLOATS:
        limit = f"one of {', '.join(_FLOATS)}; quantise the result afterwards for another"
        raise InvalidParameterError("type", type, limit)
    source = Path(folder)
    config = _read_json(source / "config.json")
    family = family_of_model_type(config.get("model_type"))
    _require_settings(config, source)
    weights = _Weights(source)
    tied = _is_tied(config, family, weights)
    tensors = [*_tensors(weights, family, config, named_type(type), tied), *rope_tensors(config, family)]
    n_vocab = next(t.shape[1] for t in tensors if t.name == "token_embd.weight")
    metadata: dict[str, Value | TypedValue] = {
        **_other_metadata(source, metadata_from, family, n_vocab),
        **metadata_of_config(config, family, source),
        "general.file_type": _FLOATS[type],
    }
    return write_gguf(path, metadata, _in_order(tensors), split_size=split_size, progress=progress)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise FileError(file, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise FileError(file, f"is not JSON: {error}") from error
    return read


def _require_settings(config: Mapping[str, Any], folder: Path) -> None:
    for key in (*REQUIRED_SETTINGS, "vocab_size"):
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnsupportedFileError(folder / "config.json", f"{key} is {value!r}, not a positive number")


class _Weights:
    """The weights of a checkpoint by name, over one or several safetensors files, loaded when asked for."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        index = folder / "model.safetensors.index.json"
        names = (
            sorted(set(_read_json(index)["weight_map"].values()))
            if index.is_file()
            else ["model.safetensors"]
        )
        self.folder = folder
        self._files: dict[str, Any] = {}
        for name in names:
            if not (folder / name).is_file():
                raise FileError(folder, f"has no {name}; save the model with safe_serialization=True")
            try:
                file: Any = safe_open(str(folder / name), framework="pt")
            except SafetensorError as error:
                raise FileError(folder / name, f"is not a sound safetensors file: {error}") from error
            self._files.update(dict.fromkeys(file.keys(), file))

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def load(self, name: str) -> Floats:
        import torch

        values: Floats = self._files[name].get_tensor(name).to(torch.float32).numpy()
        return values


def _is_tied(config: Mapping[str, Any], family: Family, weights: _Weights) -> bool:
    """Whether the head is the embedding: not stored, or said to be, or always so in llama.cpp."""
    return family.names["output"] + ".weight" not in weights or bool(config.get("tie_word_embeddings"))


def _tensors(
    weights: _Weights, family: Family, config: Mapping[str, Any], block: BlockType, tied: bool
) -> Iterator[Tensor]:
    heads = Heads(
        config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    )
    for name in weights:
        if name.endswith(_COMPUTED):
            continue
        found = family.gguf_name(name)
        if found is None:
            raise UnsupportedFileError(weights.folder, f"{name} has no counterpart in GGUF's {family.gguf}")
        ours, base = found
        if base == "output" and tied:
            continue
        shape = weights.shape(name)[::-1]
        kind = block if len(shape) > 1 else block_type(0)
        transform = family.to_gguf.get(base)
        loader = _Loader(weights, name, heads, transform, kind)
        yield Tensor(ours, kind, shape, kind.nbytes(shape), loader)


@dataclass(frozen=True)
class _Loader:
    """Reads one weight when the writer asks for it."""

    weights: _Weights
    name: str
    heads: Heads
    transform: Callable[[Floats, Heads], Floats] | None
    kind: BlockType

    def __call__(self) -> Bytes:
        values = self.weights.load(self.name)
        if self.transform is not None:
            values = self.transform(values, self.heads)
        try:
            return encode_floats(values.reshape(-1), self.kind)[0]
        except ValueError as error:
            raise UnsupportedFileError(
                self.weights.folder, f"{self.name} does not fit {self.kind}: {error}"
            ) from None


def _other_metadata(
    folder: Path, given: str | os.PathLike[str] | None, family: Family, n_vocab: int
) -> dict[str, Value | TypedValue]:
    """All that is not a hyperparameter: the general keys and the tokenizer."""
    kept = Path(given) if given is not None else folder / KEPT_METADATA
    if given is None and not kept.is_file():
        general = {"general.architecture": family.gguf, "general.name": folder.absolute().name}
        return {**general, **tokenizer_metadata(folder, n_vocab)}
    with open_model(kept) as model:
        if model.architecture != family.gguf:
            raise UnsupportedFileError(
                kept, f"is metadata of a {model.architecture}, the weights are a {family.gguf}"
            )
        tokens = model.metadata.get("tokenizer.ggml.tokens")
        if tokens is not None and len(tokens) != n_vocab:  # type: ignore[arg-type]
            raise UnsupportedFileError(
                kept,
                f"its vocabulary has {len(tokens)} entries, but the embedding {n_vocab} rows; "  # type: ignore[arg-type]
                f"give a GGUF whose tokenizer fits, or remove {KEPT_METADATA} to use tokenizer.json",
            )
        return dict(model.metadata.typed_items())


def _in_order(tensors: list[Tensor]) -> list[Tensor]:
    """Global tensors first, then layer by layer, as GGUF files usually are."""

    def place(tensor: Tensor) -> tuple[int, str]:
        layer = tensor.name.split(".")[1] if tensor.name.startswith("blk.") else "-1"
        return int(layer), tensor.name

    return sorted(tensors, key=place)
