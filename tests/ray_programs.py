"""Programs that need a Ray cluster run in a process of their own: Ray's threads and warnings stay there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_program(module: str, model: Path, folder: Path) -> None:
    """``python -m module MODEL FOLDER`` must say that all is well."""
    done = subprocess.run(
        [sys.executable, "-m", module, str(model), str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    assert "all is well" in done.stdout
