"""SmolLM2-135M made wider with zeros, so that the rows of all its matrices are whole blocks of 256; see quality.py.

    python benchmarks/padding.py          # how far logits of the wider model are from the model's own, both in F32

It is 576 wide (9 heads of 64, 3 of keys and values), which is no multiple of the K-types' 256. The wider one is 768 wide (12 heads, 4),
with zeros where it has more: what is added to the residual stream is and stays zero. Its mean of squares is 576/768 of
the model's, and so its norms' epsilon is 576/768 and their weights are √(576/768) of the model's; then both compute the same function.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamaherd.files import Tensor, open_model
from llamaherd.files.block_types import block_type

WIDER = {576: 768, 192: 256}  # the residual stream and all heads; keys' and values' heads
SHARE = 576 / 768
METADATA = {
    "llama.embedding_length": 768,
    "llama.attention.head_count": 12,
    "llama.attention.head_count_kv": 4,
}
EPSILON = "llama.attention.layer_norm_rms_epsilon"


@contextmanager
def padded(source: Path) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
    """Metadata and tensors (F32) of the wider model; read while the block lasts."""
    with open_model(source) as model:
        metadata: dict[str, Any] = {k: v for k, v in model.metadata.items() if k != "general.file_type"}
        metadata |= {**METADATA, EPSILON: metadata[EPSILON] * SHARE}
        yield metadata, [pad(tensor) for tensor in model.tensors.values()]


def pad(tensor: Tensor) -> Tensor:
    shape, f32 = tuple(WIDER.get(n, n) for n in tensor.shape), block_type(0)

    def load() -> NDArray[np.uint8]:
        values = tensor.dequantize()
        if len(shape) == 1:
            values = values * np.float32(SHARE**0.5)  # a norm's
        more = [(0, wider - n) for wider, n in zip(shape[::-1], values.shape, strict=True)]
        return np.pad(values, more).astype(np.float32, copy=False).reshape(-1).view(np.uint8)

    return dataclasses.replace(
        tensor, type=f32, shape=shape, nbytes=f32.nbytes(shape), offset=None, load=load
    )


def main() -> None:
    from llamaherd import Model
    from llamaherd.demo import demo_model
    from llamaherd.files import convert
    from llamaherd.files.writer import write_gguf
    from quality import EXACT, Predictor, compare, text, windows_of

    options = argparse.Namespace(threads=len(os.sched_getaffinity(0)), level=None)
    with Model.load(demo_model()) as model:
        windows, n_vocab = windows_of(model.vocabulary.encode(text()), 2048), model.vocabulary.n_tokens
    with tempfile.TemporaryDirectory() as folder:
        own, wide = Path(folder, "own.gguf"), Path(folder, "wide.gguf")
        with open_model(demo_model()) as file:
            convert(file, own, type="f32", sync=False)
        with padded(demo_model()) as (metadata, tensors):
            write_gguf(wide, metadata, tensors, sync=False)
        with (
            Predictor(own, "off", EXACT, n_vocab, options) as first,
            Predictor(wide, "off", EXACT, n_vocab, options) as second,
        ):
            for tokens in windows:
                rows = [first.predict(tokens), second.predict(tokens)]
                most, of = np.abs(rows[0] - rows[1]).max(), np.abs(rows[0]).max()
                (nll, _, _), (wide_nll, kl, same) = compare(rows, tokens)
                print(
                    f"{len(tokens)} tokens: logits up to {of:.1f} differ by up to {most:.1e}; "
                    f"NLL {nll:.7f} and {wide_nll:.7f}, KL {kl:.1e}, same top {same:.2%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
