"""What the machine could do bounds what the kernels do."""

import pytest

pytest.importorskip("llamaherd_kernels", reason="pip install ./kernels")
from llamaherd_kernels.library import available_levels, load
from llamaherd_kernels.measure import peak_gops, read_gigabytes


@pytest.mark.parametrize("level", available_levels())
def test_a_peak_is_that_of_a_processor(level):
    # between one product of four bytes a cycle of 1 GHz, and two of 64 bytes at 10 GHz
    assert 8 < peak_gops(level, 1) < 2560


def test_memory_is_read_and_not_skipped():
    assert 0.2 < read_gigabytes(1) < 1000


def test_levels_that_are_only_emulated_have_no_peak():
    assert load().llamaherd_kernels_peak(b"emulated8", 1) == 0
