"""``llamaherd bench``."""

import subprocess
import sys

import pytest


def bench(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "llamaherd", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_what_to_measure_must_be_said():
    done = bench()
    assert done.returncode != 0
    assert "bench --kernels" in done.stderr


def test_a_shape_is_two_numbers():
    done = bench("--kernels", "--shape", "square")
    assert done.returncode != 0
    assert "2048x2048" in done.stderr


def test_products_are_measured_beside_stock():
    pytest.importorskip("llamaherd_kernels", reason="pip install ./kernels")
    done = bench(
        "--kernels", "--types", "Q4_0 Q4_K", "--shape", "256x64", "--seconds", "0.01", "--threads", "1"
    )
    if "cannot be used here" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [line[:2] for line in lines] == [[t, n] for t in ("Q4_0", "Q4_K") for n in ("1", "8", "128")]
    assert all(float(line[4]) > 0 for line in lines)
