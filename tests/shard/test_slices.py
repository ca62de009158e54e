"""The store of slices: nothing in it is believed by its name."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from llamaherd.errors import FileError, LlamaherdError
from llamaherd.files.synthesize import synthesize
from llamaherd.shard.slices import SliceStore, read_range


@pytest.fixture
def store(tmp_path: Path) -> SliceStore:
    return SliceStore(tmp_path / "slices")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return synthesize(tmp_path / "model.gguf", "llama", layers=4)


def test_a_slice_is_cut_once(store: SliceStore, model: Path) -> None:
    path, layers = store.slice(model, 1, 3)
    assert read_range(path) == (1, 3, 4) == (1, 3, layers)
    before = os.stat(path)
    assert store.slice(model, 1, 3) == (path, 4)
    assert os.stat(path).st_ino == before.st_ino


@pytest.mark.parametrize("damage", ["renamed", "changed", "truncated", "emptied"])
def test_a_slice_that_is_not_what_was_cut_is_cut_again(store: SliceStore, model: Path, damage: str) -> None:
    path, _ = store.slice(model, 1, 3)
    whole = path.read_bytes()
    other, _ = store.slice(model, 0, 2)
    if damage == "renamed":
        shutil.copy(other, path)
    elif damage == "changed":
        with path.open("r+b") as file:
            file.seek(len(whole) - 100)
            file.write(b"\xff" * 50)
        os.utime(path, ns=(os.stat(other).st_atime_ns, os.stat(other).st_mtime_ns))
    else:
        path.write_bytes(whole[: len(whole) // 2] if damage == "truncated" else b"")
    assert store.slice(model, 1, 3)[0].read_bytes() == whole


def test_a_changed_model_has_other_slices(store: SliceStore, tmp_path: Path, model: Path) -> None:
    """Also where size and time of modification are the same, as archives and containers set them."""
    os.utime(model, (0, 0))
    first, _ = store.slice(model, 0, 2)
    content = bytearray(model.read_bytes())
    content[-64:] = bytes(64)
    model.write_bytes(content)
    os.utime(model, (0, 0))
    assert store.slice(model, 0, 2)[0] != first


@pytest.mark.parametrize("note", [b"", b"\xff\xfe", b"../../../x", b"abc\n"])
def test_notes_are_read_with_care(store: SliceStore, model: Path, note: bytes) -> None:
    path, _ = store.slice(model, 0, 2)
    identity = store.identity(model)
    notes = list(store.folder.glob("*.sha256"))
    assert notes
    for each in notes:
        each.write_bytes(note)
    assert store.identity(model) == identity
    assert store.slice(model, 0, 2)[0] == path


def test_a_folder_that_cannot_be_says_so(tmp_path: Path, model: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(FileError, match="cannot be"):
            SliceStore(folder).slice(model, 0, 2)
    with pytest.raises(LlamaherdError):
        SliceStore(tmp_path / "s").slice(tmp_path / "none.gguf", 0, 2)


def test_remains_of_killed_processes_are_removed(store: SliceStore, model: Path) -> None:
    path, _ = store.slice(model, 0, 2)
    done = subprocess.Popen(["true"])
    done.wait()
    dead = path.with_name(f".{path.name}.{done.pid}.part")
    alive = path.with_name(f".{path.name}.{os.getppid()}.part")
    for partial in (dead, alive):
        partial.write_bytes(b"x")
    path.unlink()
    store.slice(model, 0, 2)
    assert not dead.exists()
    assert alive.exists()
