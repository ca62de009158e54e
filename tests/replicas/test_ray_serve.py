"""Servers with replicas on a Ray cluster of three machines, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamaherd.files.synthesize import synthesize

pytest.importorskip("ray.serve", reason="pip install 'llamaherd[cluster]'")

ROOT = Path(__file__).parents[2]


def test_replicas_on_three_machines(tmp_path: Path) -> None:
    path = synthesize(tmp_path / "six.gguf", "llama", layers=6, type="q8_0", n_ctx=4096)
    done = subprocess.run(
        [sys.executable, "-m", "tests.replicas.ray_program", str(path), str(tmp_path / "folder")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    assert "all is well" in done.stdout
