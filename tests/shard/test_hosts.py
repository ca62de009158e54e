"""Two hosts: network namespaces with a wire between them, a Ray node in each, found by the command line.

Needs root and iproute2: ``pytest -m slow tests/shard/test_hosts.py``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray", reason="pip install 'llamaherd[cluster]'")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.real,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2"
    ),
]

ROOT = Path(__file__).parents[2]
ADDRESSES = ("10.77.0.1", "10.77.0.2")


class Host:
    """A network namespace with folders of its own."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name, self.address = name, address
        self.slices = folder / name / "slices"
        self.environment = os.environ | {
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "XDG_CONFIG_HOME": str(folder / name),
            "LLAMAHERD_SLICES": str(self.slices),
        }

    def run(self, *arguments: object, timeout: float = 120, **environment: str) -> str:
        command = ["ip", "netns", "exec", self.name, sys.executable, "-m", "llamaherd", *map(str, arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=self.environment | environment
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def processes(self) -> list[psutil.Process]:
        out = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True).stdout
        return [psutil.Process(int(pid)) for pid in out.split()]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    made = tuple(Host(f"herd{os.getpid()}-{i}", a, tmp_path) for i, a in enumerate(ADDRESSES))
    try:
        for host in made:
            ip("netns", "add", host.name)
        ip(
            "link",
            "add",
            "herd0",
            "netns",
            made[0].name,
            "type",
            "veth",
            "peer",
            "herd1",
            "netns",
            made[1].name,
        )
        for i, host in enumerate(made):
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", f"herd{i}")
            for device in ("lo", f"herd{i}"):
                ip("-n", host.name, "link", "set", device, "up")
        yield made  # type: ignore[misc]
    finally:
        for host in made:
            for process in host.processes():
                process.kill()
            subprocess.run(["ip", "netns", "del", host.name], check=False)


def test_two_hosts_run_one_model(hosts: tuple[Host, Host], demo_model_path: Path) -> None:
    first, second = hosts
    said = first.run("cluster", "start", "--memory", "150M", "--host", first.address)
    token = said.split("LLAMAHERD_CLUSTER_TOKEN=")[1].split()[0]
    stranger = subprocess.run(
        ["ip", "netns", "exec", second.name, sys.executable, "-m", "llamaherd", "cluster", "join",
         first.address, "--memory", "1G", "--host", second.address],
        env=second.environment | {"LLAMAHERD_CLUSTER_TOKEN": "ab" * 32},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert stranger.returncode == 1
    assert "oken" in stranger.stderr
    second.run(
        "cluster", "join", first.address, "--memory", "250M", "--host", second.address,
        LLAMAHERD_CLUSTER_TOKEN=token,
    )  # fmt: skip
    status = first.run("cluster", "status", first.address)
    assert all(address in status for address in ADDRESSES)
    assert status.count("reads ") == 2  # measured when they joined
    planned = json.loads(first.run("plan", "demo", "--cluster", first.address, "--n-ctx", "512", "--json"))
    assert [stage["memory"] >> 20 for stage in planned["stages"]] == [150, 250]
    assert "is as it was" not in first.run("cluster", "rebalance", first.address)  # nothing is served

    question = ["Once upon a time", "--max-tokens", 40, "--temperature", 0, "--n-ctx", 512]
    whole = first.run("run", "demo", *question)
    serving = subprocess.Popen(
        ["ip", "netns", "exec", first.name, sys.executable, "-m", "llamaherd", "run", "demo", *map(str, question),
         "--max-tokens", "450", "--cluster", first.address],
        env=first.environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert serving.stdout is not None
    text = serving.stdout.read(60)
    assert whole.startswith(text[: len(whole.rstrip())]) or text.startswith(whole.rstrip())
    rebalanced = first.run("cluster", "rebalance", first.address)
    layers = [f"{a} - {b - 1}" for a, b in (stage["layers"] for stage in planned["stages"])]
    assert f"is as it was; layers {', '.join(layers)}" in rebalanced
    # while it runs: each host maps the slice of its own layers, and no other file of the model
    mapped = {}
    for host in hosts:
        files = set()
        for process in host.processes():
            try:
                if "StageActor" in " ".join(process.cmdline()):
                    files |= {Path(m.path) for m in process.memory_maps() if m.path.endswith(".gguf")}
            except psutil.Error:
                continue
        (mapped[host.name],) = files
        assert mapped[host.name].parent == host.slices
    assert len(set(mapped.values())) == 2
    serving.kill()
    serving.communicate()
    deadline = time.monotonic() + 30
    while "150 MiB free" not in first.run("cluster", "status", first.address):
        assert time.monotonic() < deadline, "the memory of a stage whose head has gone is not given back"
    assert first.run("run", "demo", *question, "--cluster", first.address) == whole
