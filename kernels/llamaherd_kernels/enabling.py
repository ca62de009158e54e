"""Switch the plug-in on, after its self-test has passed in a process of its own."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .library import TYPES, available_levels, library_path, load

__all__ = ["DEFAULT_TYPES", "Status", "enable", "status"]

LOGGER = logging.getLogger("llamaherd_kernels")
LOGGER.addHandler(logging.NullHandler())

_NOT_REPACKED_ON_ARM64 = ("Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "IQ4_XS")
DEFAULT_TYPES: dict[str, tuple[str, ...]] = {
    "avx2": tuple(TYPES),
    "avxvnni": tuple(TYPES),
    "avx512vnni": tuple(TYPES),
    "avx512bf16": tuple(TYPES),
    "i8mm": _NOT_REPACKED_ON_ARM64,
    "dotprod": _NOT_REPACKED_ON_ARM64,
}
"""Types that are switched on by default: on x86 all, with which whole models were faster than with stock
where they were measured (F16 on AVX2 for few rows only). Nothing was measured on arm64: stock keeps the types
there for which it has repacked layouts of its own, and attention."""

_UNMEASURED = ("i8mm", "dotprod")
_TEST_SECONDS = 120
_CPU_LINES = ("flags", "model name", "Features", "CPU implementer", "CPU part")  # of /proc/cpuinfo


@dataclasses.dataclass(frozen=True)
class Status:
    """What runs, and why.

    Attributes:
        active: the plug-in computes.
        level: its instruction set, or "".
        types: the weight types that it takes.
        attention: it computes attention too.
        reason: why it is not active, or what is left to stock; "" if there is nothing to say.
    """

    active: bool
    level: str = ""
    types: tuple[str, ...] = ()
    reason: str = ""
    attention: bool = False


_status = Status(False, reason="not enabled")


def status() -> Status:
    """What enable() found."""
    return _status


def enable(
    types: tuple[str, ...] | None = None, level: str | None = None, attention: bool | None = None
) -> Status:
    """Make llama.cpp use the plug-in for models that are loaded from now on.

    Call it before the first model is loaded: llama.cpp makes its list of buffer types then, once. A second
    call changes nothing. It never raises: where something is not as expected, stock llama.cpp stays.

    Args:
        types: weight types to take; default: the level's ``DEFAULT_TYPES``.
        level: instruction set; default: the best that this CPU has and whose self-test passes.
        attention: take attention too, if its self-test passes; default: on levels where it was measured.
    """
    global _status
    if _status.active:
        return _status
    try:
        _status = _enable(types, level, attention)
    except Exception as error:
        _status = Status(False, reason=f"{type(error).__name__}: {error}")
    if _status.active:
        what = [*_status.types, *(["attention"] if _status.attention else [])]
        LOGGER.info("llama.cpp uses %s kernels for %s", _status.level, ", ".join(what))
    else:
        LOGGER.warning("stock llama.cpp kernels: %s", _status.reason)
    return _status


def _enable(types: tuple[str, ...] | None, level: str | None, attention: bool | None) -> Status:
    if platform.system() != "Linux":
        return Status(False, reason=f"not tried on {platform.system()}")
    here = available_levels()
    if level is not None and level not in here:
        return Status(
            False, reason=f"this CPU does not run level {level!r}; it runs {', '.join(here) or 'none'}"
        )
    reasons = []
    for name in [level] if level else here:
        wanted = DEFAULT_TYPES[name] if types is None else types
        unknown = [kind for kind in wanted if kind not in TYPES]
        if unknown:
            return Status(False, reason=f"no kernels for {', '.join(unknown)}; there are {', '.join(TYPES)}")
        result = _self_test(name)
        passed = tuple(kind for kind in wanted if kind in result.get("passed", ()))
        if not passed:
            reasons.append(f"{name}: {result.get('problem') or 'self-test failed'}")
            continue
        from llama_cpp import llama_cpp

        bits = sum(1 << TYPES[kind] for kind in passed)
        wanted_too = name not in _UNMEASURED if attention is None else attention
        attends = wanted_too and "attention" in result["passed"]
        install, handle = load().llamaherd_kernels_install, llama_cpp._lib._handle
        problem = install(handle, name.encode(), bits, int(attends)).decode()
        if problem:
            return Status(False, reason=problem)
        failed = result.get("failed", {})
        reason = "; ".join(f"{kind}: {why}" for kind, why in failed.items())
        return Status(True, name, passed, reason, attends)
    return Status(
        False, reason="; ".join(reasons) or "this CPU has none of the instruction sets that are built in"
    )


def counts() -> tuple[int, int, int]:
    """Tensors packed, products and attention computed by the plug-in, in this process."""
    found = (ctypes.c_int64 * 3)()
    load().llamaherd_kernels_counts(found)
    return found[0], found[1], found[2]


def _self_test(level: str) -> dict[str, Any]:
    """The self-test's result, from the cache if plug-in, llama.cpp and CPU are the same as then."""
    cache = _cache_folder() / f"selftest-{level}-{_fingerprint()}.json"
    try:
        cached: dict[str, Any] = json.loads(cache.read_text())
        return cached
    except (OSError, ValueError):
        pass
    result = _run_self_test(level)
    if "passed" in result:  # what failed for want of time or memory may pass another day
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=cache.parent, delete=False) as file:
                json.dump(result, file)
            os.replace(file.name, cache)
        except OSError:
            pass
    return result


def _run_self_test(level: str) -> dict[str, Any]:
    environment = {**os.environ, "LLAMAHERD_KERNELS": "off"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "llamaherd_kernels.selftest", level, *TYPES, "attention"]
    try:
        run = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_TEST_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"problem": f"the self-test did not end: {error}"}
    if run.returncode != 0:
        last = (run.stderr.strip().splitlines() or [""])[-1]
        return {"problem": f"the self-test died with status {run.returncode} {last}".rstrip()}
    try:
        result: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
        return result
    except (IndexError, ValueError):
        return {"problem": "the self-test printed no result"}


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llamaherd"


def _fingerprint() -> str:
    """Of what the result depends on: the plug-in, llama.cpp and the CPU."""
    import llama_cpp

    digest = hashlib.sha256()
    folder = Path(llama_cpp.__file__).parent / "lib"
    for path in [
        library_path(),
        *sorted(Path(__file__).parent.glob("*.py")),
        *sorted(folder.glob("libggml*")),
    ]:
        found = path.stat()
        digest.update(f"{path}|{found.st_size}|{found.st_mtime_ns}\n".encode())
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            digest.update("".join(sorted({line for line in file if line.startswith(_CPU_LINES)})).encode())
    except OSError:
        digest.update(platform.processor().encode())
    return digest.hexdigest()[:16]
