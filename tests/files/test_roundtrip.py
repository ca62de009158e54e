"""Whatever a file can say is read back as it was said: hypothesis makes the files."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaherd import files
from llamaherd.files.block_types import BlockType, block_type
from llamaherd.files.legacy import HEADERS
from llamaherd.files.metadata import TypedValue, ValueType
from llamaherd.files.model_file import Tensor
from llamaherd.files.writer import write_gguf

NUMBERS = [kind for kind in ValueType if kind.dtype is not None and kind is not ValueType.BOOL]


def number(kind: ValueType) -> st.SearchStrategy[Any]:
    assert kind.dtype is not None
    if kind.dtype.kind == "f":
        return st.floats(width=8 * kind.dtype.itemsize, allow_nan=False)  # type: ignore[arg-type]
    info = np.iinfo(kind.dtype)
    return st.integers(int(info.min), int(info.max))


def array(kind: ValueType) -> st.SearchStrategy[TypedValue]:
    return st.lists(number(kind), max_size=20).map(
        lambda items: TypedValue(ValueType.ARRAY, np.array(items, kind.dtype), kind)
    )


texts = st.one_of(st.text(max_size=30), st.binary(max_size=30).filter(lambda raw: not is_text(raw)))


def is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


flat = st.one_of(
    *(number(kind).map(lambda value, kind=kind: TypedValue(kind, value)) for kind in NUMBERS),
    *(array(kind) for kind in NUMBERS),
    st.booleans().map(lambda value: TypedValue(ValueType.BOOL, value)),
    texts.map(lambda value: TypedValue(ValueType.STRING, value)),
    st.lists(texts, max_size=100).map(lambda items: TypedValue(ValueType.ARRAY, items, ValueType.STRING)),
    st.lists(st.booleans()).map(
        lambda items: TypedValue(ValueType.ARRAY, np.array(items, np.bool_), ValueType.BOOL)
    ),
)
nested = st.lists(st.sampled_from(NUMBERS).flatmap(array), max_size=4).map(
    lambda items: TypedValue(ValueType.ARRAY, items, ValueType.ARRAY)
)
keys = st.text(min_size=1, max_size=40).filter(lambda key: not key.startswith(("general.", "split.")))
KINDS = [block_type(n) for n in (*range(4), *range(6, 31), 34, 35, 39, 40, 41, 42)]


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    names = draw(st.lists(st.text(min_size=1, max_size=40), unique=True, max_size=6))
    out = []
    for name in names:
        kind: BlockType = draw(st.sampled_from(KINDS))
        shape = (
            kind.block_size * draw(st.integers(1, 3)),
            *draw(st.lists(st.integers(1, 4), max_size=3)),
        )
        raw = np.frombuffer(draw(st.binary(min_size=1, max_size=16)), np.uint8)
        out.append(Tensor.from_bytes(name, kind, shape, np.resize(raw, kind.nbytes(shape))))
    return out


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(keys, st.one_of(flat, nested), max_size=8),
    tensors(),
    st.sampled_from([None, 8, 64, 4096]),
    st.sampled_from([None, 500]),
)
def test_gguf_reads_what_was_written(
    metadata: dict[str, TypedValue], written: list[Tensor], alignment: int | None, split: int | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = write_gguf(
            Path(folder) / "x.gguf", metadata, written, alignment=alignment, split_size=split, sync=False
        )
        with files.open(paths[-1]) as model:
            read = {key: model.metadata.typed(key) for key in model.metadata}
            for key, value in metadata.items():
                assert read[key] == value, key
            assert list(model.tensors) == [tensor.name for tensor in written]
            for tensor in written:
                found = model.tensors[tensor.name]
                assert (found.type, found.shape) == (tensor.type, tensor.shape)
                np.testing.assert_array_equal(found.raw, tensor.raw)
                assert (found.offset or 0) % (alignment or 32) == 0


OLD_KINDS = {
    ("ggml", None): (1, (0, 1, 2, 3, 4, 5, 6, 7, 8)),
    ("ggmf", 1): (1, (0, 1, 2, 3, 4, 5, 6, 7, 8)),
    ("ggjt", 1): (1, (0, 1, 2, 3, 4, 5, 6, 7, 8)),
    ("ggjt", 2): (2, (0, 1, 2, 3, 6, 7, 8)),
    ("ggjt", 3): (3, (0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14)),
}
MAGIC = {"ggml": b"lmgg", "ggmf": b"fmgg", "ggjt": b"tjgg"}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_older_containers_read_what_was_written(data: st.DataObject) -> None:
    """The bytes are put together here, from the table of the formats, not by our writer."""
    container, version = data.draw(st.sampled_from(list(OLD_KINDS)))
    era, numbers = OLD_KINDS[container, version]
    architecture = data.draw(st.sampled_from(sorted(HEADERS)))
    tokens = data.draw(st.lists(st.binary(max_size=20), min_size=1, max_size=80))
    header = {name: data.draw(st.integers(1, 1000)) for name in HEADERS[architecture]}
    header |= {"n_vocab": len(tokens), "n_vocab_again": len(tokens), "ftype": 0}
    out = bytearray(MAGIC[container] + (b"" if version is None else struct.pack("<I", version)))
    for name in HEADERS[architecture]:
        out += struct.pack("<f" if name in ("alibi_max", "clip_kqv") else "<i", header[name])
    scores = [float(data.draw(st.integers(-1000, 1000))) for _ in tokens]
    for token, score in zip(tokens, scores, strict=True):
        out += (
            struct.pack("<I", len(token)) + token + (b"" if container == "ggml" else struct.pack("<f", score))
        )
    expected = {}
    for index in range(data.draw(st.integers(1, 4))):
        kind = block_type(data.draw(st.sampled_from(numbers)), era)
        shape = (
            kind.block_size * data.draw(st.integers(1, 3)),
            *data.draw(st.lists(st.integers(1, 4), max_size=1)),
        )
        raw = np.resize(
            np.frombuffer(data.draw(st.binary(min_size=1, max_size=9)), np.uint8), kind.nbytes(shape)
        )
        name = f"tensor {index} é".encode()
        out += struct.pack(f"<iiI{len(shape)}i", len(shape), len(name), kind.number, *shape) + name
        out += bytes(-len(out) % 32) if container == "ggjt" else b""
        out += raw.tobytes()
        expected[name.decode()] = (kind, shape, raw)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.bin"
        path.write_bytes(out)
        with files.open(path, architecture=architecture) as model:
            assert (model.container, model.version) == (container, version)
            read: Any = model.metadata["tokens"]
            assert list(read.raws()) == tokens
            for name in HEADERS[architecture]:
                assert model.metadata[name] == header[name]
            if container != "ggml":
                assert model.metadata["scores"].tolist() == scores  # type: ignore[union-attr]
            found = {name: (t.type, t.shape) for name, t in model.tensors.items()}
            assert found == {name: (kind, shape) for name, (kind, shape, _) in expected.items()}
            for name, (_, _, raw) in expected.items():
                np.testing.assert_array_equal(model.tensors[name].raw, raw)
