from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llamaherd import files
from llamaherd.errors import InvalidParameterError, UnsupportedFileError
from llamaherd.files.block_types import block_type, named_type
from llamaherd.files.metadata import TypedValue, ValueType
from llamaherd.files.model_file import Tensor
from llamaherd.files.strings import StringArray
from llamaherd.files.synthesize import make_tiny_model
from llamaherd.files.writer import encode_header, split_path, write_gguf

VALUES: dict[str, TypedValue] = {
    "general.architecture": TypedValue(ValueType.STRING, "llama"),
    "a.u8": TypedValue(ValueType.UINT8, 255),
    "a.i8": TypedValue(ValueType.INT8, -128),
    "a.u16": TypedValue(ValueType.UINT16, 65535),
    "a.i16": TypedValue(ValueType.INT16, -32768),
    "a.u32": TypedValue(ValueType.UINT32, 2**32 - 1),
    "a.i32": TypedValue(ValueType.INT32, -(2**31)),
    "a.f32": TypedValue(ValueType.FLOAT32, 1.5),
    "a.bool": TypedValue(ValueType.BOOL, True),
    "a.u64": TypedValue(ValueType.UINT64, 2**64 - 1),
    "a.i64": TypedValue(ValueType.INT64, -(2**63)),
    "a.f64": TypedValue(ValueType.FLOAT64, 0.1),
    "a.text": TypedValue(ValueType.STRING, "é日本 🦙"),
    "a.texts": TypedValue(ValueType.ARRAY, ["", "Ġthe", "a\x00b"], ValueType.STRING),
    "a.string_array": TypedValue(ValueType.ARRAY, StringArray.from_texts(["x", "yy"]), ValueType.STRING),
    "a.ints": TypedValue(ValueType.ARRAY, np.array([1, -2, 3], np.int32), ValueType.INT32),
    "a.bools": TypedValue(ValueType.ARRAY, np.array([True, False]), ValueType.BOOL),
    "a.empty": TypedValue(ValueType.ARRAY, np.array([], np.float32), ValueType.FLOAT32),
}


def tensor(name: str, rows: int = 3, columns: int = 32, seed: int = 0) -> Tensor:
    values = np.random.default_rng(seed).standard_normal((rows, columns), np.float32)
    return Tensor.from_bytes(name, block_type(0), (columns, rows), values)


def test_the_gguf_package_reads_every_value_type(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, VALUES, [tensor("a"), tensor("b", seed=1)])
    reader = gguf.GGUFReader(path)
    assert reader.fields["GGUF.version"].contents() == 3
    for key, value in VALUES.items():
        field = reader.fields[key]
        assert field.types[0].value == value.type, key
        plain: Any = value.value
        if value.type is ValueType.ARRAY:
            plain = list(plain)
            if plain:
                assert field.types[-1].value == value.element_type
                assert field.contents() == plain, key
        else:
            assert field.contents() == plain, key
    for name, seed in (("a", 0), ("b", 1)):
        found = next(t for t in reader.tensors if t.name == name)
        assert list(found.shape) == [32, 3]
        assert found.data.tobytes() == tensor(name, seed=seed).raw.tobytes()
        assert found.data_offset % 32 == 0


def test_our_reader_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    nested = TypedValue(
        ValueType.ARRAY,
        [TypedValue(ValueType.ARRAY, np.array([1, 2], np.int32), ValueType.INT32)],
        ValueType.ARRAY,
    )
    values = {**VALUES, "a.bytes": TypedValue(ValueType.STRING, b"\xff\xfe"), "a.nested": nested}
    write_gguf(path, values, [tensor("a")])
    with files.open(path) as model:
        for key, value in values.items():
            assert model.metadata.typed(key) == value, key
        again = tmp_path / "y.gguf"
        write_gguf(again, model.metadata, model.tensors.values())
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("type", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q6_k", "q4_k", "bf16", "f16"])
def test_quantised_tensors_keep_their_bytes_and_shapes(tmp_path: Path, type: str) -> None:
    block = named_type(type)
    raw = np.random.default_rng(1).integers(0, 256, block.nbytes((256, 4, 2)), np.uint8)
    write_gguf(
        tmp_path / "x.gguf",
        {"general.architecture": "llama"},
        [Tensor.from_bytes("t", block, (256, 4, 2), raw)],
    )
    (found,) = gguf.GGUFReader(tmp_path / "x.gguf").tensors
    assert list(found.shape) == [256, 4, 2]
    assert found.tensor_type.name.lower() == type
    assert found.data.tobytes() == raw.tobytes()


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_alignment_is_kept_and_stated(tmp_path: Path, alignment: int) -> None:
    odd = [tensor(f"t{i}", rows=1, columns=i + 1) for i in range(5)]
    write_gguf(tmp_path / "x.gguf", {"general.architecture": "llama"}, odd, alignment=alignment)
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    assert reader.alignment == alignment
    assert all(t.data_offset % alignment == 0 for t in reader.tensors)
    assert [t.data.tobytes() for t in reader.tensors] == [t.raw.tobytes() for t in odd]


def test_the_metadata_s_own_alignment_is_used(tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "x.gguf", {"general.architecture": "llama", "general.alignment": 128}, [tensor("a")]
    )
    assert gguf.GGUFReader(tmp_path / "x.gguf").tensors[0].data_offset % 128 == 0


def test_split_files_load_in_stock_llama_and_say_the_same(tmp_path: Path, stock_llama: Any) -> None:
    model = make_tiny_model("llama", layers=3)
    whole = write_gguf(tmp_path / "whole.gguf", model.metadata, model.tensors)[0]
    parts = write_gguf(tmp_path / "split.gguf", model.metadata, model.tensors, split_size=150_000)
    assert len(parts) > 2
    assert parts[0].name == f"split-00001-of-{len(parts):05d}.gguf"
    assert all(part.stat().st_size < 150_000 + 40_000 for part in parts)
    one = stock_llama.ask(path=whole, prompt="the llama", n=8)
    many = stock_llama.ask(path=parts[0], prompt="the llama", n=8)
    assert one["logits"] == many["logits"]
    with files.open(parts[1]) as opened:
        assert [t.raw.tobytes() for t in opened.tensors.values()] == [t.raw.tobytes() for t in model.tensors]


def test_what_fits_is_not_split(tmp_path: Path) -> None:
    assert write_gguf(tmp_path / "x.gguf", {}, [tensor("a")], split_size=1 << 20) == [tmp_path / "x.gguf"]
    assert split_path("a/b.gguf", 0, 12).name == "b-00001-of-00012.gguf"


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    big = tensor("big", rows=3000, columns=1024)  # more than one piece of 8 MiB
    write_gguf(
        tmp_path / "x.gguf",
        VALUES,
        [big, tensor("a")],
        progress=lambda done, total: seen.append((done, total)),
    )
    size = (tmp_path / "x.gguf").stat().st_size
    assert seen[-1] == (size, size)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) >= 3


def test_an_interrupted_split_leaves_nothing(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    tensors = [tensor(f"t{i}", seed=i) for i in range(6)]
    with pytest.raises(KeyboardInterrupt):
        write_gguf(tmp_path / "x.gguf", {}, tensors, split_size=400, progress=stop)
    assert os.listdir(tmp_path) == []


def test_tensors_are_loaded_one_at_a_time(tmp_path: Path) -> None:
    alive: list[int] = []
    loads: list[str] = []

    def lazy(index: int) -> Tensor:
        def load() -> np.ndarray[Any, np.dtype[np.uint8]]:
            loads.append(f"t{index}")
            return np.full(64, index, np.uint8)

        return Tensor(f"t{index}", block_type(24), (64,), 64, load)

    def watch(done: int, total: int) -> None:
        alive.append(len(loads))

    write_gguf(tmp_path / "x.gguf", {}, [lazy(i) for i in range(4)], progress=watch)
    assert loads == ["t0", "t1", "t2", "t3"]
    assert alive == [1, 2, 3, 4]


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    with pytest.raises(InvalidParameterError, match="once"):
        write_gguf(path, {}, [tensor("a"), tensor("a")])
    with pytest.raises(InvalidParameterError, match="power of two"):
        write_gguf(path, {}, [tensor("a")], alignment=48)
    with pytest.raises(InvalidParameterError, match="split_size"):
        write_gguf(path, {}, [tensor("a")], split_size=0)
    old = Tensor.from_bytes("old", block_type(2, era=1), (32,), np.zeros(20, np.uint8))
    with pytest.raises(UnsupportedFileError, match="q4_0/v1"):
        write_gguf(path, {}, [old])
    short = Tensor("short", block_type(0), (8,), 32, lambda: np.zeros(16, np.uint8))
    with pytest.raises(InvalidParameterError, match="16 bytes where 32"):
        write_gguf(path, {}, [short])
    assert os.listdir(tmp_path) == []


def test_the_header_alone_is_the_file_s_beginning(tmp_path: Path) -> None:
    tensors = [tensor("a"), tensor("b")]
    write_gguf(tmp_path / "x.gguf", VALUES, tensors)
    header = encode_header(VALUES, tensors)
    assert (tmp_path / "x.gguf").read_bytes().startswith(header)
    assert len(header) == gguf.GGUFReader(tmp_path / "x.gguf").data_offset
