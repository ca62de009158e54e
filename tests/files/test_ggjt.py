from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest

from llamaherd import files
from llamaherd.errors import FileError, MalformedFileError, TruncatedFileError, UnsupportedFileError


def ggml(
    *,
    fields: tuple[int, ...] = (4, 32, 32, 1, 1, 32, 0),
    tokens: list[bytes] | None = None,
    magic: bytes = b"lmgg",
    version: int | None = None,
    tensors: bytes = b"",
) -> bytes:
    """A llama file of before GGUF, field by field."""
    out = (
        magic
        + (b"" if version is None else struct.pack("<I", version))
        + struct.pack(f"<{len(fields)}i", *fields)
    )
    for token in tokens if tokens is not None else [b"a", b"bc", b"", b"d"]:
        out += struct.pack("<I", len(token)) + token + (b"" if magic == b"lmgg" else struct.pack("<f", 1.5))
    return out + tensors


def tensor(name: bytes = b"tok_embeddings.weight", shape: tuple[int, ...] = (32, 4), kind: int = 0) -> bytes:
    head = struct.pack(f"<iiI{len(shape)}i", len(shape), len(name), kind, *shape) + name
    return head + np.arange(np.prod(shape), dtype="<f4").tobytes()


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "x.bin"
    path.write_bytes(data)
    return path


def test_reads_a_ggml_file_written_by_hand(tmp_path: Path) -> None:
    with files.open(write(tmp_path, ggml(tensors=tensor()))) as model:
        assert (model.container_name, model.architecture) == ("ggml", "llama")
        assert model.metadata["n_embd"] == 32
        assert model.metadata["tokens"] == ["a", "bc", "", "d"]
        assert "scores" not in model.metadata
        weights = model.tensors["tok_embeddings.weight"]
        assert weights.shape == (32, 4)
        assert weights.dequantize()[3].tolist() == list(range(96, 128))
        assert not weights.raw.flags.owndata  # a view, though unaligned


def test_scores_stand_between_the_texts(tmp_path: Path) -> None:
    with files.open(write(tmp_path, ggml(magic=b"fmgg", version=1, tensors=tensor()))) as model:
        assert model.container_name == "ggmf-1"
        assert model.metadata["scores"].tolist() == [1.5] * 4  # type: ignore[union-attr]
        assert model.metadata["tokens"] == ["a", "bc", "", "d"]


@pytest.mark.parametrize("version", [1, 2, 3])
def test_ggjt_aligns_its_data(tmp_path: Path, version: int) -> None:
    data = ggml(magic=b"tjgg", version=version)
    record = tensor()
    head, weights = record[: -4 * 128], record[-4 * 128 :]
    data += head
    data += bytes(-len(data) % 32) + weights
    with files.open(write(tmp_path, data)) as model:
        loaded = model.tensors["tok_embeddings.weight"]
        assert loaded.offset is not None
        assert loaded.offset % 32 == 0
        assert loaded.raw.ctypes.data % 32 == 0
        assert loaded.dequantize()[0, 1] == 1


def test_the_quantisation_version_beats_the_container(tmp_path: Path) -> None:
    """rustformers wrote GGML files with the blocks of GGJT 3 and ftype 2002."""
    record = struct.pack("<iiI2i", 2, 21, 2, 32, 4) + b"tok_embeddings.weight"
    for ftype, nbytes, era in ((2, 20, 1), (1002, 20, 2), (2002, 18, 3)):
        data = ggml(fields=(4, 32, 32, 1, 1, 32, ftype), tensors=record + bytes(4 * nbytes))
        with files.open(write(tmp_path, data)) as model:
            assert model.tensors["tok_embeddings.weight"].type.era == era


def test_an_architecture_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path, ggml(tensors=tensor(b"strange")))
    with pytest.raises(UnsupportedFileError, match="architecture="):
        files.open(path)
    with files.open(path, architecture="llama") as model:
        assert list(model.tensors) == ["strange"]
    with pytest.raises(UnsupportedFileError, match="no GGML files of architecture 'bert'"):
        files.open(path, architecture="bert")


HOSTILE = {
    "n_vocab near 2^31": (ggml(fields=(2**31 - 1, 32, 32, 1, 1, 32, 0)), TruncatedFileError, "vocabulary"),
    "n_vocab negative": (ggml(fields=(-4, 32, 32, 1, 1, 32, 0)), MalformedFileError, "n_vocab is -4"),
    "n_embd zero": (ggml(fields=(4, 0, 32, 1, 1, 32, 0)), MalformedFileError, "n_embd is 0"),
    "a token longer than the file": (ggml(tokens=[b"a"]) + b"\xff" * 12, TruncatedFileError, "vocabulary"),
    "a tensor longer than the file": (
        ggml(tensors=tensor() + tensor(b"norm.weight", (32,))[:-1]),
        TruncatedFileError,
        "norm.weight",
    ),
    "three dimensions": (
        ggml(tensors=tensor() + struct.pack("<iiI3i", 3, 1, 0, 1, 1, 1) + b"x" + bytes(99)),
        MalformedFileError,
        "3 dimensions",
    ),
    "a negative side": (
        ggml(tensors=tensor() + struct.pack("<iiI2i", 2, 1, 0, -1, -1) + b"x" + bytes(99)),
        MalformedFileError,
        "(-1, -1)",
    ),
    "a name longer than the file": (
        ggml(tensors=tensor() + struct.pack("<iiIi", 1, 2**31 - 1, 0, 1)),
        TruncatedFileError,
        "name",
    ),
    "a negative name": (
        ggml(tensors=tensor() + struct.pack("<iiIi", 1, -5, 0, 1) + bytes(9)),
        TruncatedFileError,
        "name",
    ),
    "an unknown type": (
        ggml(tensors=tensor() + struct.pack("<iiIi", 1, 1, 77, 32) + b"x" + bytes(99)),
        MalformedFileError,
        "type 77",
    ),
    "half a block": (
        ggml(tensors=tensor() + struct.pack("<iiIi", 1, 1, 2, 40) + b"x" + bytes(99)),
        MalformedFileError,
        "whole q4_0/v1",
    ),
    "a tensor twice": (ggml(tensors=tensor() * 2), MalformedFileError, "twice"),
    "another version": (ggml(magic=b"tjgg", version=9), UnsupportedFileError, "version 9"),
    "a part of nothing": (
        ggml(fields=(4, 100, 32, 1, 1, 32, 0), tensors=tensor()),
        MalformedFileError,
        "no part of n_embd",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused(tmp_path: Path, case: str) -> None:
    data, error, message = HOSTILE[case]
    path = write(tmp_path, data)
    with pytest.raises(error, match=re.escape(message)):
        files.open(path)
    assert any(fault.severity == "error" for fault in files.check(path))


def test_parts_must_belong_together(tmp_path: Path) -> None:
    first = ggml(fields=(4, 64, 32, 1, 1, 32, 0), tensors=tensor())
    path = write(tmp_path, first)
    with pytest.raises(FileError, match=r"x\.bin\.1"):
        files.open(path)
    other = tmp_path / "x.bin.1"
    other.write_bytes(ggml(fields=(4, 64, 32, 1, 2, 32, 0), tensors=tensor()))
    with pytest.raises(MalformedFileError, match="header differs"):
        files.open(path)
    other.write_bytes(
        ggml(fields=(4, 64, 32, 1, 1, 32, 0), tensors=tensor(shape=(32, 3)) + tensor(b"norm.weight", (32,)))
    )
    with pytest.raises(MalformedFileError, match="differs in the other parts"):
        files.open(path)
    other.write_bytes(first)
    with files.open(path) as model:
        joined = model.tensors["tok_embeddings.weight"]
        assert joined.shape == (64, 4)
        assert joined.dequantize()[1].tolist() == [*range(32, 64), *range(32, 64)]
