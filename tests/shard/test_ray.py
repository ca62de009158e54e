"""Stages on a Ray cluster of three machines, in a process of its own: Ray's threads and warnings stay there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamaherd.errors import WorkerStartError
from llamaherd.files.synthesize import synthesize
from llamaherd.shard import ray_processes

pytest.importorskip("ray", reason="pip install 'llamaherd[cluster]'")

ROOT = Path(__file__).parents[2]


def test_three_machines(tmp_path: Path) -> None:
    path = synthesize(tmp_path / "six.gguf", "llama", layers=6, type="q8_0", n_ctx=1024)
    done = subprocess.run(
        [sys.executable, "-m", "tests.shard.ray_program", str(path), str(tmp_path / "slices")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "all is well" in done.stdout


def test_a_cluster_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "2")
    with pytest.raises(WorkerStartError, match="Ray did not start"):
        ray_processes.join("127.0.0.1:1", 1 << 30)


def test_the_token_is_kept_for_this_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("LLAMAHERD_CLUSTER_TOKEN", raising=False)
    assert ray_processes.read_token() == ""
    ray_processes._keep_token("secret")
    assert ray_processes.read_token() == "secret"
    assert (tmp_path / "llamaherd" / "cluster-token").stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("LLAMAHERD_CLUSTER_TOKEN", "other")
    assert ray_processes.environment(ray_processes.read_token())["RAY_AUTH_TOKEN"] == "other"
