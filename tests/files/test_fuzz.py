from __future__ import annotations

import os
import random
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from tests.files.mutations import cuts, mutate, seeds

from llamaherd import files
from llamaherd.errors import FileError, InvalidParameterError

SLACK = 2 << 20  # Python's own objects weigh more than these small files


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return seeds(tmp_path_factory.mktemp("seeds"))


def use(path: Path, to: str | None = None) -> None:
    """Do with a file whatever a user would; only our typed errors may come out."""
    try:
        with files.open(path) as model:
            for key in model.metadata:
                value = model.metadata[key]
                if hasattr(value, "__len__"):
                    list(value)  # type: ignore[arg-type]
            files.find_duplicate_token(model.metadata)
            for tensor in model.tensors.values():
                assert tensor.raw.nbytes == tensor.nbytes
                if tensor.n_elements < 1 << 20:
                    with suppress(FileError):
                        tensor.dequantize()
            if to is not None:
                with suppress(InvalidParameterError):  # an alignment that no writer takes
                    files.convert(model, path.with_name("converted"), to=to, sync=False)
            if model.container == "ggla":
                for half in files.adapter_contents(model)[1]:
                    half.raw.sum()
            else:
                for tensor in files.contents_of(model).tensors.values():
                    assert tensor.raw.nbytes == tensor.nbytes
    except FileError:
        pass
    try:
        for fault in files.check(path):
            str(fault)
    except FileError:
        pass


def run(good: dict[str, bytes], folder: Path, count: int, seed: int) -> None:
    dice = random.Random(seed)
    others = list(good.values())
    path = folder / "broken"
    use_once = path.with_name("warm")
    use_once.write_bytes(others[0])
    use(use_once)  # what is imported on first use is not the file's fault
    slowest, slow_turn = 0.0, ""
    for turn in range(count):
        name = dice.choice(list(good))
        data = mutate(dice, good[name], others)
        path.unlink(missing_ok=True)  # the old one may still be mapped
        path.write_bytes(data)
        measured = turn % 25 == 0
        if measured:
            tracemalloc.start()
        start = time.process_time()
        try:
            use(path, dice.choice((None, None, None, "gguf", "ggjt1", "ggjt3", "ggml")))
        except BaseException:
            keep = Path(os.environ.get("TMPDIR", "/tmp")) / f"llamaherd-fuzz-{seed}-{turn}"
            keep.write_bytes(data)
            print(f"seed {seed}, turn {turn}, from {name}: kept as {keep}")
            raise
        slowest, slow_turn = max(
            (slowest, slow_turn), (time.process_time() - start, f"seed {seed}, turn {turn}, {name}")
        )
        if measured:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 2 * len(data) + SLACK, f"seed {seed}, turn {turn}: {peak} bytes for {len(data)}"
    print(f"{count} files, the slowest took {slowest:.3f} s: {slow_turn}")
    assert slowest < 1.0, slow_turn


def test_broken_files_raise_typed_errors_only(good: dict[str, bytes], tmp_path: Path) -> None:
    run(good, tmp_path, 3000, seed=1)


@pytest.mark.fuzz
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(100, 104))
def test_200_000_broken_files(good: dict[str, bytes], tmp_path: Path, seed: int) -> None:
    run(good, tmp_path, 50_000, seed)


def test_a_file_cut_anywhere_in_its_header_is_refused(good: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "cut"
    for name, data in good.items():
        for cut in cuts(data, 400 if len(data) > 1000 else 200):
            path.unlink(missing_ok=True)
            path.write_bytes(cut)
            if name != "ggla":  # its tensors follow one another: cut between two, it is a shorter file
                with pytest.raises(FileError):
                    files.open(path)
            assert [fault for fault in files.check(path) if fault.severity == "error"], name


def test_seeds_are_good(good: dict[str, bytes], tmp_path: Path) -> None:
    """Or else the fuzzer would only exercise the first check."""
    for name, data in good.items():
        path = tmp_path / name
        path.write_bytes(data)
        with files.open(path) as model:
            assert model.tensors
        if name not in ("gguf1", "gguf-big-endian"):
            assert not [fault for fault in files.check(path) if fault.severity == "error"], name
