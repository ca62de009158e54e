"""llama.cpp's AMX kernels get no weights: their entry leaves the list before a model is loaded."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from llamaherd.native import amx
from llamaherd.native.kernels import enable_kernels
from llamaherd.native.library import GGML


class FakeLlama:
    """A list of buffer types, and the copy that is made when it is first asked for."""

    def __init__(self, names: list[bytes]) -> None:
        self.names = {i + 1: name for i, name in enumerate(names)}
        self.memory = (ctypes.c_size_t * len(names))(*self.names)
        begin = ctypes.addressof(self.memory)
        end = begin + ctypes.sizeof(self.memory)
        self.vector = amx._Vector(begin, end, end)
        self.copy: list[int] | None = None

    def ggml_backend_buft_name(self, entry: int) -> bytes:
        return self.names[entry]

    def copied(self) -> list[int]:
        if self.copy is None:
            self.copy = self.vector.read()
        return self.copy


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> FakeLlama:
    fake = FakeLlama([b"AMX", b"CPU_REPACK"])
    monkeypatch.setattr(amx, "GGML", fake)
    monkeypatch.setattr(amx, "_buffer_types", lambda: fake.vector)
    monkeypatch.setattr(amx, "_copied", fake.copied)
    monkeypatch.delenv("LLAMAHERD_AMX", raising=False)
    return fake


def test_the_entry_leaves(llama: FakeLlama) -> None:
    with amx.without_amx():
        assert llama.vector.read() == [2]
    assert llama.vector.read() == [2] == llama.copied()


def test_another_may_join_meanwhile(llama: FakeLlama) -> None:
    llama.names[3] = b"LLAMAHERD"
    with amx.without_amx():
        llama.vector.write([3, 2])
    assert llama.vector.read() == [3, 2] == llama.copied()


def test_it_stays_where_models_may_use_it_already(llama: FakeLlama) -> None:
    llama.copied()
    with amx.without_amx():
        pass
    assert llama.vector.read() == [1, 2]


def test_it_stays_where_it_is_wanted(llama: FakeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAHERD_AMX", "on")
    with amx.without_amx():
        pass
    assert llama.vector.read() == [1, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="libstdc++'s names")
def test_the_real_list_is_found_and_read() -> None:
    enable_kernels()
    vector = amx._buffer_types()
    assert vector is not None
    names = [GGML.ggml_backend_buft_name(entry) for entry in vector.read()]
    assert b"CPU_REPACK" in names
    assert b"AMX" not in names
    assert amx._copied() == vector.read()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ggml_is_loaded_once() -> None:
    """A second copy of a library would have a list, and a registry, of its own."""
    code = (
        "import llamaherd.native.amx, llamaherd.native.kernels as k; k.enable_kernels();"
        "print(*{l.split('/')[-1].split('.so')[0] + ' ' + l.split()[4] for l in open('/proc/self/maps')"
        " if 'libggml' in l}, sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ},
        timeout=100,
    )
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert sorted(names) == ["libggml", "libggml-base", "libggml-cpu"]
