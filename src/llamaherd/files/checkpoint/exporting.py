"""GGUF to a transformers checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamaherd.errors import FileError, InvalidParameterError, UnsupportedFileError
from llamaherd.files.atomic import require_space
from llamaherd.files.checkpoint.config import config_of_model
from llamaherd.files.checkpoint.extras import require_extra
from llamaherd.files.checkpoint.families import Family, Heads, family_of_gguf
from llamaherd.files.checkpoint.tokenizer import export_tokenizer
from llamaherd.files.model_file import ModelFile
from llamaherd.files.writer import Progress, write_gguf

__all__ = ["DTYPES", "KEPT_METADATA", "export_torch"]

DTYPES = ("float32", "bfloat16", "float16")
"""What the weights of a checkpoint may be."""

KEPT_METADATA = "gguf-metadata.gguf"
"""In an exported folder: the source's metadata without tensors, so that it comes back whole."""

_SHARD = 2 << 30
_IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # in config.json


def export_torch(
    model: ModelFile,
    folder: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    model_type: str | None = None,
    shard_size: int = _SHARD,
    progress: Progress | None = None,
) -> Path:
    """Write ``model`` as a transformers checkpoint into the new ``folder`` and return it.

    Safetensors of at most ``shard_size`` bytes, ``config.json``, tokenizer files, and the GGUF metadata for
    the way back. dtype: see `DTYPES`; quantised weights are dequantised. model_type: "mistral" to have a
    llama file as one. Memory holds one shard at a time.

    Needs torch, safetensors and transformers (the extra ``llamaherd[transformers]``). Raises
    InvalidParameterError (an architecture without a known mapping), UnsupportedFileError (tensors or
    scalings with no counterpart), FileError (the folder exists, or the disk is full).
    """
    require_extra("torch", "safetensors", "transformers")
    if dtype not in DTYPES:
        raise InvalidParameterError("dtype", dtype, f"one of {', '.join(DTYPES)}")
    family = family_of_gguf(model.architecture, model_type)
    config = config_of_model(model, family)
    config["dtype"] = dtype
    target = Path(folder)
    if target.exists():
        raise FileError(folder, "exists already; name a new folder")
    names = _torch_names(model, family)
    size = sum(t.n_elements for t in model.tensors.values()) * (4 if dtype == "float32" else 2)
    require_space(target, size)
    with _new_folder(target) as partial:
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        _write_shards(model, family, names, config, partial, dtype, shard_size, size, progress)
        if model.metadata.get("tokenizer.ggml.tokens") is not None:
            export_tokenizer(model.metadata, partial, model.path)
        write_gguf(partial / KEPT_METADATA, model.metadata, [], sync=False)
    return target


class _new_folder:  # noqa: N801 - a context manager used like a function
    """A temporary folder beside the target that becomes it when the block ends, or vanishes."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __enter__(self) -> Path:
        parent = self._target.absolute().parent
        self._partial = Path(tempfile.mkdtemp(prefix=f".{self._target.name}-", dir=parent))
        return self._partial

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._partial.chmod(0o755)
            os.replace(self._partial, self._target)
        else:
            shutil.rmtree(self._partial, ignore_errors=True)


def _torch_names(model: ModelFile, family: Family) -> dict[str, tuple[str, str]]:
    names = {}
    for name in model.tensors:
        if name in _IGNORED:
            continue
        found = family.torch_name(name)
        if found is None:
            raise UnsupportedFileError(
                model.path, f"{name} has no counterpart in transformers' {family.model_type}"
            )
        names[name] = found
    return names


def _write_shards(
    model: ModelFile, family: Family, names: Mapping[str, tuple[str, str]], config: Mapping[str, Any],
    folder: Path, dtype: str, shard_size: int, total: int, progress: Progress | None,
) -> None:  # fmt: skip
    import torch
    from safetensors.torch import save_file

    width = 4 if dtype == "float32" else 2
    shards: list[list[str]] = [[]]
    room = shard_size
    for name in names:
        nbytes = model.tensors[name].n_elements * width
        if shards[-1] and nbytes > room:
            shards.append([])
            room = shard_size
        shards[-1].append(name)
        room -= nbytes
    heads = Heads(
        config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    )
    weight_map: dict[str, str] = {}
    done = 0
    for index, shard in enumerate(shards):
        file = (
            "model.safetensors"
            if len(shards) == 1
            else f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        )
        loaded = {}
        for name in shard:
            theirs, base = names[name]
            values = model.tensors[name].dequantize()
            if base in family.to_torch:
                values = family.to_torch[base](values, heads)
            # a copy: what the file's mapping backs must not outlive it
            loaded[theirs] = torch.tensor(values).to(getattr(torch, dtype))
            weight_map[theirs] = file
            done += model.tensors[name].n_elements * width
            if progress is not None:
                progress(done, total)
        save_file(loaded, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        described = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(described, indent=2) + "\n", "utf-8")
