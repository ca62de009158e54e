"""How far logits of quantised weights are from those of the same weights with exact activations; see kernels.py.

SmolLM2's matrices, widened with zeros to whole blocks of every type (padding.py), are quantised by llama.cpp, all in one type.
The reference is that file dequantised to F32 on stock llama.cpp, keys and values F32 too and no flash attention (which casts them to F16).
Stock and the kernels compute the quantised file with their defaults.
All three run at once, each in a process of its own, and are compared window by window: no more than three windows of logits
are kept.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padding import padded
from rows import Rows

TYPES = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 IQ4_NL MXFP4 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_XS F16 BF16".split()
WINDOW = 512
EXACT = {"type_k": "f32", "type_v": "f32", "flash_attn_type": "disabled"}
ROOT = Path(__file__).parents[1]
_PIECE = 32  # rows of logits compared at once, in float64


def compare_quality(options: argparse.Namespace, rows: Rows) -> None:
    from llamaherd import Model
    from llamaherd.demo import demo_model

    with Model.load(demo_model()) as model:
        windows = windows_of(model.vocabulary.encode(text()), options.tokens)
        n_vocab = model.vocabulary.n_tokens
    print(
        f"{windows.size} tokens in {len(windows)} windows, {options.threads} threads; NLL and KL in nats a token, PPL: perplexity, ±: standard error over windows"
    )
    print(
        f"{'type':8}{'NLL exact':>11}{'stock':>9}{'ours':>9}{'PPL stock':>12}{'ours':>12}{'ratio':>19}"
        f"{'KL stock':>11}{'ours':>11}{'ours - stock':>22}{'ratio':>8}{'top stock':>11}{'ours':>8}"
    )
    for name in options.types or TYPES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.gguf"
            quantise(demo_model(), path, name, options.only)
            found = measure(path, windows, n_vocab, options)
        if found is None:
            print(f"{name:8}the kernels took no weights: stock's products", flush=True)
            continue
        stock, ours = found["stock"], found["ours"]
        kl, kl_error = mean_and_error([b - a for a, b in zip(stock.kl, ours.kl, strict=True)])
        nll, nll_error = mean_and_error([b - a for a, b in zip(stock.nll, ours.nll, strict=True)])
        print(
            f"{name:8}{np.mean(found['exact'].nll):11.4f}{np.mean(stock.nll):9.4f}{np.mean(ours.nll):9.4f}"
            f"{np.exp(np.mean(stock.nll)):12.3f}{np.exp(np.mean(ours.nll)):12.3f}{np.exp(nll):9.5f} ±{np.exp(nll) * nll_error:.6f}"
            f"{np.mean(stock.kl):11.6f}{np.mean(ours.kl):11.6f}{kl:+12.6f} ±{kl_error:.6f}"
            f"{np.mean(ours.kl) / np.mean(stock.kl):8.3f}{np.mean(stock.same_top):11.2%}{np.mean(ours.same_top):8.2%}",
            flush=True,
        )
        statistics = {label: of_path.summary() for label, of_path in found.items()}
        rows.add(
            type=name,
            only=options.only,
            tokens=windows.size,
            window=WINDOW,
            nll_ours_minus_stock=nll,
            nll_ours_minus_stock_error=nll_error,
            perplexity_ratio=float(np.exp(nll)),
            kl_ours_minus_stock=kl,
            kl_ours_minus_stock_error=kl_error,
            kl_ratio=float(np.mean(ours.kl) / np.mean(stock.kl)),
            **statistics,
        )


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean, and its standard error."""
    return float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values)))


# ------------------------------------------------------------------------------------- text and weights


def text() -> str:
    """This project's README and pages, and what its sources say of themselves."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    sources = sorted(path for folder in ("src", "kernels") for path in (ROOT / folder).rglob("*.py"))
    return "\n\n".join([*(page.read_text(encoding="utf-8") for page in pages), *map(docstrings, sources)])


def docstrings(path: Path) -> str:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, documented)
    ]
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes)))


def windows_of(tokens: list[int], wanted: int) -> NDArray[np.int32]:
    """Windows of ``wanted`` tokens or a few more, two or more, from all over the text: int32 [windows, WINDOW]."""
    count = max(2, min(-(-wanted // WINDOW), len(tokens) // WINDOW))
    starts = np.linspace(0, len(tokens) - WINDOW, count).astype(int)
    return np.array([tokens[start : start + WINDOW] for start in starts], np.int32)


def quantise(source: Path, target: Path, name: str, only: str) -> None:
    """Write the wider model with its matrices in the type ``name``, or those with ``only`` in their names; others stay F32."""
    from llamaherd_kernels import ggml as graphs
    from llamaherd_kernels.library import TYPES as NUMBERS

    from llamaherd.files import Tensor
    from llamaherd.files.block_types import block_type
    from llamaherd.files.writer import write_gguf

    ggml, kind = graphs.bind(), block_type(NUMBERS[name])

    def converted(tensor: Tensor) -> Tensor:
        if len(tensor.shape) == 1 or only not in tensor.name:
            return tensor
        size = kind.nbytes(tensor.shape)

        def load() -> NDArray[np.uint8]:
            values, raw = tensor.dequantize(), np.empty(size, np.uint8)
            n, columns = values.shape
            ggml.ggml_quantize_chunk(kind.number, values.ctypes.data, raw.ctypes.data, 0, n, columns, None)
            return raw

        return dataclasses.replace(tensor, type=kind, nbytes=size, load=load)

    with padded(source) as (metadata, tensors):
        write_gguf(target, metadata, map(converted, tensors), sync=False)


# ------------------------------------------------------------------------------------- comparison


@dataclasses.dataclass
class Found:
    """Of each window: mean negative log-likelihood, mean KL(exact || this), share of tokens with exact's top."""

    nll: list[float] = dataclasses.field(default_factory=list)
    kl: list[float] = dataclasses.field(default_factory=list)
    same_top: list[float] = dataclasses.field(default_factory=list)

    def summary(self) -> dict[str, float]:
        found = {"perplexity": float(np.exp(np.mean(self.nll)))}
        for name, values in vars(self).items():
            found[name], found[f"{name}_error"] = mean_and_error(values)
        return found


def measure(
    path: Path, windows: NDArray[np.int32], n_vocab: int, options: argparse.Namespace
) -> dict[str, Found] | None:
    """None if the kernels take no weights of the file here, so that stock would be compared with itself."""
    from llamaherd.files import convert, open_model

    exact = path.with_suffix(".f32.gguf")
    with open_model(path) as model:
        convert(model, exact, type="f32", sync=False)
    found = {label: Found() for label in ("exact", "stock", "ours")}
    with (
        Predictor(exact, "off", EXACT, n_vocab, options) as reference,
        Predictor(path, "off", {}, n_vocab, options) as stock,
        Predictor(path, "require", {}, n_vocab, options) as ours,
    ):
        for tokens in windows:
            rows = [predictor.predict(tokens) for predictor in (reference, stock, ours)]
            if not ours.taken:
                return None
            for label, row in zip(found, compare(rows, tokens), strict=True):
                found[label].nll.append(row[0])
                found[label].kl.append(row[1])
                found[label].same_top.append(row[2])
    return found


def compare(rows: list[NDArray[np.float32]], tokens: NDArray[np.int32]) -> NDArray[np.float64]:
    """[negative log-likelihood, KL to the first, same top as the first] of each of ``rows``, means of a window."""
    sums = np.zeros((len(rows), 3))
    for begin in range(0, len(tokens), _PIECE):
        pieces = [log_softmax(row[begin : begin + _PIECE]) for row in rows]
        exact, targets = pieces[0], tokens[begin + 1 : begin + 1 + _PIECE]
        probabilities = np.exp(exact)
        for of_path, piece in zip(sums, pieces, strict=True):
            of_path[0] -= piece[np.arange(len(targets)), targets].sum()
            of_path[1] += (probabilities * (exact - piece)).sum()
            of_path[2] += (piece.argmax(axis=1) == exact.argmax(axis=1)).sum()
    # the last token's successor is not in the window
    return sums / [len(tokens) - 1, len(tokens), len(tokens)]


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """In float64: some types' divergence is as small as the rounding of logarithms in float32."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


# ------------------------------------------------------------------------------------- processes


class Predictor:
    """A model in a process of its own, for a process has the kernels or has them not. Logits come by a mapped file.

    Attributes:
        taken: weights that the kernels took, known after predict().
    """

    def __init__(
        self, path: Path, mode: str, params: dict[str, str], n_vocab: int, options: argparse.Namespace
    ) -> None:
        self.taken = 0
        logits = path.with_suffix(f".{mode}.logits")
        self._logits = np.memmap(logits, np.float32, "w+", shape=(WINDOW, n_vocab))
        request = {
            "path": str(path),
            "logits": str(logits),
            "shape": [WINDOW, n_vocab],
            "params": params,
            "threads": options.threads,
            "level": options.level if mode == "require" else None,
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(request)],
            env={**os.environ, "LLAMAHERD_KERNELS": mode},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def predict(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """Logits [WINDOW, n_vocab] of a text with nothing before it, valid until the next call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(tokens.tolist()) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"the process that computes died with status {self._process.wait()}")
        self.taken = int(answer)
        return self._logits

    def __enter__(self) -> Predictor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()  # closes its input, which ends it


def serve(request: dict[str, Any], lines: Iterator[str]) -> None:
    """Predictor's process: tokens come as lines of JSON; each is answered when its logits are in the file."""
    import llamaherd_kernels
    from llamaherd_kernels.enabling import counts

    from llamaherd import Context, Model
    from llamaherd.engine.protocol import Batch
    from llamaherd.native.amx import without_amx

    if request["level"]:  # else they are enabled with the model
        with without_amx():
            llamaherd_kernels.enable(level=request["level"])
    logits = np.memmap(request["logits"], np.float32, "r+", shape=tuple(request["shape"]))
    threads = request["threads"]
    with (
        Model.load(request["path"]) as model,
        Context(
            model,
            n_ctx=WINDOW,
            n_batch=WINDOW,
            n_threads=threads,
            n_threads_batch=threads,
            **request["params"],
        ) as context,
    ):
        for line in lines:
            tokens = np.array(json.loads(line), np.int32)
            context.memory.clear()
            sequence = np.full(len(tokens), context.memory.allocate(), np.int32)
            batch = Batch(
                tokens, np.arange(len(tokens), dtype=np.int32), sequence, np.ones(len(tokens), bool)
            )
            context.run(batch, into=(logits, np.arange(len(tokens))))
            print(counts()[0], flush=True)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]), iter(sys.stdin))
