from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from llamaherd import files
from llamaherd.engine.quantize import quantize
from llamaherd.errors import FileError, MalformedFileError, NativeError
from llamaherd.files.block_types import block_type
from llamaherd.files.imatrix import read_imatrix
from llamaherd.files.model_file import Tensor
from llamaherd.files.synthesize import synthesize
from llamaherd.files.writer import write_gguf


def f32(name: str, values: np.ndarray) -> Tensor:
    return Tensor.from_bytes(name, block_type(0), values.shape[::-1], values.astype("<f4"))


def gguf_matrix(path: Path, name: str, sums: np.ndarray, counts: np.ndarray) -> Path:
    tensors = [f32(f"{name}.in_sum2", sums), f32(f"{name}.counts", counts)]
    write_gguf(path, {"general.type": "imatrix"}, tensors)
    return path


def dat_matrix(path: Path, name: str, values: np.ndarray, calls: int) -> Path:
    raw = name.encode()
    head = struct.pack("<ii", 1, len(raw)) + raw + struct.pack("<ii", calls, len(values))
    path.write_bytes(head + values.astype("<f4").tobytes())
    return path


def test_both_formats_give_means(tmp_path: Path) -> None:
    sums = np.array([[2.0, 4.0, 6.0], [0.0, 0.0, 0.0]])
    found = read_imatrix(
        gguf_matrix(tmp_path / "a.gguf", "blk.0.ffn_up.weight", sums, np.array([[2.0], [0.0]]))
    )
    assert found["blk.0.ffn_up.weight"].tolist() == [
        1,
        2,
        3,
        1,
        1,
        1,
    ]  # an expert never chosen counts the same
    found = read_imatrix(dat_matrix(tmp_path / "a.dat", "w", np.array([2.0, 4.0]), 2))
    assert found["w"].tolist() == [1, 2]


def test_broken_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MalformedFileError, match="no importance matrix"):
        read_imatrix(synthesize(tmp_path / "m.gguf"))
    with pytest.raises(MalformedFileError, match="not finite"):
        read_imatrix(dat_matrix(tmp_path / "a.dat", "w", np.array([np.nan]), 1))
    good = dat_matrix(tmp_path / "b.dat", "w", np.array([1.0, 2.0]), 1).read_bytes()
    for cut in range(1, len(good)):
        (tmp_path / "c.dat").write_bytes(good[:cut])
        with pytest.raises(FileError):
            read_imatrix(tmp_path / "c.dat")
    (tmp_path / "d.dat").write_bytes(b"\xff\xff\xff\x7f" + bytes(60))
    with pytest.raises(MalformedFileError, match="is it one"):
        read_imatrix(tmp_path / "d.dat")


def test_the_quantiser_heeds_it(tmp_path: Path) -> None:
    """Columns said to matter come out better than the same columns without."""
    source = synthesize(tmp_path / "a.gguf", "llama", n_embd=256, n_ff=512)
    name = "blk.0.attn_q.weight"
    weights = np.full((1, 256), 1e-6)
    weights[0, ::32] = 1.0
    matrix = gguf_matrix(tmp_path / "i.gguf", name, weights, np.array([[1.0]]))
    quantize(source, tmp_path / "plain.gguf", "q4_k_s", n_threads=1)
    quantize(source, tmp_path / "heeded.gguf", "q4_k_s", imatrix=matrix, n_threads=1)

    def error(path: Path) -> float:
        with files.open(source) as before, files.open(path) as after:
            off = before.tensors[name].dequantize() - after.tensors[name].dequantize()
            return float(np.square(off[:, ::32]).mean())

    assert error(tmp_path / "heeded.gguf") < 0.7 * error(tmp_path / "plain.gguf")


def test_failures_say_what_libllama_said(tmp_path: Path) -> None:
    (tmp_path / "junk.gguf").write_bytes(b"GGUF" + bytes(99))
    with pytest.raises(NativeError, match="bad GGUF version"):
        quantize(tmp_path / "junk.gguf", tmp_path / "x.gguf", "q8_0")
