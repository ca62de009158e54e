from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest
from tests.cli.conftest import COMMAND, Run

from llamaherd.engine.cpus import available_cpus


def test_it_says_what_computes_and_with_how_many_threads(llamaherd: Run) -> None:
    facts = json.loads(llamaherd("info", "--json").stdout)
    assert facts["threads"].startswith(f"{available_cpus()}: ")
    assert "0.3" in facts["llama-cpp-python"]
    shown = llamaherd("info").stdout
    for name, value in facts.items():
        assert name in shown
        if name != "memory":
            assert value in shown


@pytest.mark.skipif(
    shutil.which("taskset") is None or (os.cpu_count() or 1) < 2, reason="needs taskset and two CPUs"
)
def test_threads_follow_the_cpus_it_may_use(environment: dict[str, str]) -> None:
    cpu = min(os.sched_getaffinity(0))
    done = subprocess.run(
        ["taskset", "-c", str(cpu), *COMMAND, "info", "--json"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert json.loads(done.stdout)["threads"].startswith("1: the CPUs that this process may run on, of ")


def test_a_wait_policy_of_ones_own_is_kept(llamaherd: Run) -> None:
    facts = json.loads(llamaherd("info", "--json", OMP_WAIT_POLICY="ACTIVE").stdout)
    assert facts["OMP_WAIT_POLICY"].startswith("ACTIVE (waiting threads spin")
