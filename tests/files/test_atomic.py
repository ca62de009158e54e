from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from llamaherd.errors import FileError
from llamaherd.files import atomic
from llamaherd.files.atomic import replacing


def test_the_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    target.write_bytes(b"old")
    with replacing(target) as file:
        file.write(b"new")
        assert target.read_bytes() == b"old"
    assert target.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["model.gguf"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "model.gguf"
    target.write_bytes(b"old")

    def fail() -> None:
        with replacing(target) as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        fail()
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["model.gguf"]


def test_ctrl_c_leaves_no_half_file(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys
        from llamaherd.files.atomic import replacing
        with replacing(sys.argv[1]) as file:
            print("writing", flush=True)
            while True:
                file.write(bytes(1000))
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "model.gguf")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) != 0
    assert os.listdir(tmp_path) == []


def test_space_is_checked_before_a_byte_is_written(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="free; make room"), replacing(tmp_path / "x", 1 << 60):
        pytest.fail("the block must not run")
    assert os.listdir(tmp_path) == []


def test_a_missing_folder_and_a_folder_as_target_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="does not exist"), replacing(tmp_path / "no" / "x"):
        pass
    with pytest.raises(FileError, match="is a folder"), replacing(tmp_path):
        pass


def test_a_failing_write_is_a_file_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(FileError, match="No space left"), replacing(tmp_path / "x") as file:
        file.write(b"data")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_name_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileError, match="no file can have that name"), replacing(tmp_path / name):
        pass
    assert not list(tmp_path.iterdir())
