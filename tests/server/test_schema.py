"""Requests made up from our own OpenAPI schema: no answer is a 5xx, however odd the request."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import serving

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(3000)]


def test_no_request_is_answered_with_a_500(demo_model_path: Path, tmp_path: Path) -> None:
    with serving("--n-ctx", "1024", "--max-sequences", "8") as server:
        command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}/openapi.json"]
        command += ["--checks", "not_a_server_error", "--phases", "examples,coverage,fuzzing"]
        command += ["--max-examples", "30", "--request-timeout", "120", "--workers", "1", "--seed", "1"]
        command += ["--exclude-path", "/health"]
        run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        print(run.stdout[-6000:])
        assert run.returncode == 0, run.stdout[-6000:]
        status = server.status()
        assert status["restarts"] == 0
