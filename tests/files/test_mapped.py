from __future__ import annotations

from pathlib import Path

import pytest

from llamaherd.errors import FileError, ModelNotFoundError, NotAModelFileError, TruncatedFileError
from llamaherd.files.mapped import Cursor, MappedFile


def mapped(tmp_path: Path, data: bytes) -> Cursor:
    path = tmp_path / "x"
    path.write_bytes(data)
    return MappedFile(path).cursor()


def test_reads_what_is_there_and_no_more(tmp_path: Path) -> None:
    cursor = mapped(tmp_path, b"\x01\x02\x00\x00\x00\xff\xff\xff\xff\x00\x00\x80\x3fabc")
    assert (cursor.u8(), cursor.u32(), cursor.i32(), cursor.f32()) == (1, 2, -1, 1.0)
    assert cursor.take(2, "letters") == b"ab"
    with pytest.raises(TruncatedFileError) as caught:
        cursor.u32()
    assert (caught.value.offset, caught.value.needed, caught.value.size) == (15, 19, 16)


@pytest.mark.parametrize("n", [-1, 2**63, 2**64 - 1])
def test_an_absurd_length_is_refused_before_it_is_used(tmp_path: Path, n: int) -> None:
    cursor = mapped(tmp_path, b"abcd")
    with pytest.raises(TruncatedFileError, match="a name needs"):
        cursor.take(n, "a name")
    with pytest.raises(TruncatedFileError):
        cursor.skip(n, "a tensor")
    assert cursor.at == 0


def test_big_endian(tmp_path: Path) -> None:
    cursor = mapped(tmp_path, b"\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x01\x00")
    cursor.big_endian = True
    assert (cursor.u32(), cursor.u64()) == (2, 256)


def test_what_cannot_be_opened_says_why(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        MappedFile(tmp_path / "nothing.gguf")
    with pytest.raises(ModelNotFoundError, match="folder"):
        MappedFile(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(NotAModelFileError, match="empty"):
        MappedFile(tmp_path / "empty")
    with pytest.raises(FileError):
        MappedFile("/dev/null")


def test_the_mapping_is_read_only(tmp_path: Path) -> None:
    cursor = mapped(tmp_path, b"abcd")
    with pytest.raises(ValueError, match="read-only"):
        cursor.data[0] = 1
