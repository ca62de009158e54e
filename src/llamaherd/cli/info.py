"""``llamaherd info``: what computes here, and with how many threads."""

from __future__ import annotations

import json
import os
import platform
from typing import Annotated, Any

import typer

from ..demo import find_demo_model

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add this module's command to ``app``."""
    app.command("info")(info_command)


def info_command(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Versions, CPU features, threads and why, and where the demo model is."""
    facts = _facts()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")


def _facts() -> dict[str, Any]:
    from .. import __version__
    from ..engine.cpus import available_memory
    from ..native.amx import amx_is_wanted
    from ..native.kernels import enable_kernels
    from ..native.library import library_info

    library = library_info()
    memory = available_memory()
    threads, why = _threads()
    features = _features(library["system"])
    amx = "used" if amx_is_wanted() else "not used: it crashes in many builds; LLAMAHERD_AMX=on uses it"
    return {
        "llamaherd": __version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "llama-cpp-python": f"{library['llama_cpp_python']} (tested with {library['tested_with']})",
        "ggml": library["ggml"],
        "cpu": _cpu(),
        "features": ", ".join(features) or "none reported",
        **({"AMX": amx} if "AMX_INT8" in features else {}),
        "kernels": str(enable_kernels()),
        "threads": f"{threads}: {why}",
        "OMP_WAIT_POLICY": _wait_policy(),
        "memory": "unknown" if memory is None else f"{memory / 2**30:.1f} GiB available",
        "demo model": str(find_demo_model() or "not installed: pip install 'llamaherd[demo]'"),
    }


def _threads() -> tuple[int, str]:
    """Threads that a context gets by default, and what decides it."""
    from ..engine.cpus import available_cpus

    used = available_cpus()
    machine = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    if used < allowed:
        return (
            used,
            f"this container's quota, of {allowed} CPUs it sees; more threads would wait for each other",
        )
    if allowed < machine:
        return used, f"the CPUs that this process may run on, of {machine}"
    return used, "all CPUs of this machine; --threads N takes fewer"


def _wait_policy() -> str:
    policy = os.environ.get("OMP_WAIT_POLICY", "")  # llamaherd has set it if nobody else had
    meanings = {"PASSIVE": "waiting threads sleep", "ACTIVE": "waiting threads spin: slow beside other work"}
    meaning = meanings.get(policy.upper())
    return f"{policy} ({meaning})" if meaning else policy or "not set"


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _features(system: str) -> list[str]:
    """``CPU : SSE3 = 1 | AVX = 0 | ...`` -> the names that are on."""
    found = []
    for item in system.replace("CPU :", "").split("|"):
        name, _, value = item.partition("=")
        if value.strip() not in ("", "0"):
            found.append(name.strip() if value.strip() == "1" else f"{name.strip()} {value.strip()}")
    return found
