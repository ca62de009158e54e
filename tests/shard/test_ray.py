"""Stages on a Ray cluster of three machines, in a process of its own: Ray's threads and warnings stay there."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from tests.ray_programs import run_program

from llamaherd.errors import InvalidParameterError, WorkerError, WorkerStartError
from llamaherd.files.synthesize import synthesize
from llamaherd.shard import ray_processes

pytest.importorskip("ray", reason="pip install 'llamaherd[cluster]'")

from llamaherd.shard import ray_nodes


def test_three_machines(tmp_path: Path) -> None:
    path = synthesize(tmp_path / "six.gguf", "llama", layers=6, type="q8_0", n_ctx=1024)
    run_program("tests.shard.ray_program", path, tmp_path / "slices")


@pytest.mark.parametrize(
    ("address", "kind", "what"),
    [
        ("127.0.0.1:1", WorkerError, "nothing answers"),
        ("no-such-host.invalid", WorkerError, "nothing answers"),
        ("127.0.0.1:99999", InvalidParameterError, "HOST:PORT"),
        ("127.0.0.1:", InvalidParameterError, "HOST:PORT"),
        (":6379", InvalidParameterError, "HOST:PORT"),
        ("", InvalidParameterError, "HOST:PORT"),
    ],
)
def test_a_cluster_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, kind: type[Exception], what: str
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    began = time.monotonic()
    with pytest.raises(kind, match=what):
        ray_processes.join(address, 1 << 30)
    with pytest.raises(kind, match=what):
        ray_nodes.connect(address)
    assert time.monotonic() - began < 20


def test_the_token_is_kept_for_this_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("LLAMAHERD_CLUSTER_TOKEN", raising=False)
    assert ray_processes.read_token() == ""
    ray_processes._keep_token("secret")
    assert ray_processes.read_token() == "secret"
    assert (tmp_path / "llamaherd" / "cluster-token").stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("LLAMAHERD_CLUSTER_TOKEN", "other")
    assert ray_processes.environment(ray_processes.read_token())["RAY_AUTH_TOKEN"] == "other"


@pytest.mark.parametrize(
    ("settings", "kind", "what"),
    [
        ({"port": 0}, InvalidParameterError, "65535"),
        ({"port": -1}, InvalidParameterError, "65535"),
        ({"port": 99999999}, InvalidParameterError, "65535"),
        ({"host": "no-such-host.invalid"}, InvalidParameterError, "this machine"),
        ({"host": "192.0.2.77"}, InvalidParameterError, "this machine"),
    ],
)
def test_a_cluster_begins_at_an_address_of_this_machine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, object],
    kind: type[Exception],
    what: str,
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(kind, match=what):
        ray_processes.start(1 << 30, **settings)
    assert not list(tmp_path.iterdir()), "the token of a cluster that may run is kept"


def test_a_cluster_does_not_begin_where_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(WorkerStartError, match="already"):
        ray_processes.start(1 << 30, port=taken.getsockname()[1])
    assert not list(tmp_path.iterdir())
