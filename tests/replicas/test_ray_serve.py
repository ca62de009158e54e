"""Servers with replicas on a Ray cluster of three machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.ray_programs import run_program

from llamaherd.files.synthesize import synthesize

pytest.importorskip("ray.serve", reason="pip install 'llamaherd[cluster]'")


def test_replicas_on_three_machines(tmp_path: Path) -> None:
    path = synthesize(tmp_path / "six.gguf", "llama", layers=6, type="q8_0", n_ctx=4096)
    run_program("tests.replicas.ray_program", path, tmp_path / "folder")
