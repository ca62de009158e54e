from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamaherd.engine import state
from llamaherd.errors import OutOfCellsError
from llamaherd.worker.kv_store import KVStore

FOR = {"model": "m"}


class Engine:
    """Saves and restores bytes that stand for a state."""

    def __init__(self, cells: int = 10_000) -> None:
        self.cells = cells
        self.restored: list[tuple[int, ...]] = []

    def save_sequence_file(self, sequence: int, path: Path, tokens: list[int] | tuple[int, ...] = ()) -> None:
        state.write(path, state.pack(b"x" * 1000, FOR, len(tokens), tokens))

    def restore_sequence(self, data: bytes) -> int:
        saved = state.unpack(data, FOR)
        if saved.length > self.cells:
            raise OutOfCellsError(saved.length, 0, self.cells)
        self.cells -= saved.length
        self.restored.append(saved.tokens)
        return len(self.restored)


class Scheduler:
    """Holds idle sequences."""

    def __init__(self, *held: range) -> None:
        self.held = [(i, np.array(tokens, np.int32)) for i, tokens in enumerate(held)]
        self.adopted: list[list[int]] = []

    def idle(self) -> list[tuple[int, NDArray[np.int32]]]:
        return self.held

    def adopt(self, sequence: int, tokens: NDArray[np.int32]) -> None:
        self.adopted.append(tokens.tolist())


def test_what_one_worker_saves_the_next_one_has(tmp_path: Path) -> None:
    first, second = range(100), range(200, 350)
    store = KVStore(tmp_path / "kv", 1 << 20, Engine(), Scheduler(first, second, range(5)))
    assert store.save_some()
    assert store.save_some()
    assert not store.save_some()  # the third is too short to be worth it
    next_ = Scheduler()
    again = KVStore(tmp_path / "kv", 1 << 20, Engine(), next_)
    assert sorted(next_.adopted) == [list(first), list(second)]
    assert again.restored_tokens == 250


def test_the_most_recent_ones_come_first_and_as_many_as_fit(tmp_path: Path) -> None:
    held = [range(i, i + 100) for i in range(5)]
    store = KVStore(tmp_path, 1 << 20, Engine(), Scheduler(*held))
    store.save_idle()
    for i, path in enumerate(store._files()):
        os.utime(path, (i, i))
    newest = [state.saved_tokens(p.read_bytes())[0] for p in store._files()[-2:]]
    next_ = Scheduler()
    KVStore(tmp_path, 1 << 20, Engine(cells=250), next_)
    assert [tokens[0] for tokens in next_.adopted] == newest  # the last one is the most recently used


def test_the_folder_keeps_its_size(tmp_path: Path) -> None:
    held = [range(i, i + 100) for i in range(20)]
    store = KVStore(tmp_path, 5000, Engine(), Scheduler(*held))
    while store.save_some():
        pass
    assert 1 <= len(list(tmp_path.iterdir())) <= 4
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= 5000


def test_files_of_other_models_and_damaged_ones_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.kv").write_bytes(b"nonsense")
    (tmp_path / "b.kv").write_bytes(state.pack(b"x", {"model": "other"}, 1, [1]))
    whole = state.pack(b"x" * 50, FOR, 40, list(range(40)))
    (tmp_path / "c.kv").write_bytes(whole[:-3])
    (tmp_path / "d.kv").write_bytes(whole)
    scheduler = Scheduler()
    KVStore(tmp_path, 1 << 20, Engine(), scheduler)
    assert scheduler.adopted == [list(range(40))]
