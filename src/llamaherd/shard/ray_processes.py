"""Ray's processes on this machine, started with the settings that matter here; ray itself is not imported."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import InvalidParameterError, UnsupportedError, WorkerError, WorkerStartError

__all__ = [
    "PORT",
    "RESOURCE",
    "SPEED",
    "environment",
    "join",
    "reach",
    "read_token",
    "require_ray",
    "start",
    "stop",
    "use_token",
]

PORT = 6379
RESOURCE = "llamaherd_mib"
"""The resource that says how many MiB a machine gives."""
SPEED = "llamaherd_mb_per_second"
"""The one that says how fast it reads weights while it decodes, where that was measured."""

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's own 15 starves stages beside anything else
    # a lost machine is noticed within about 6 s, not 65
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "15",  # nor a lost head, after 60
    "RAY_enable_open_telemetry": "0",
}
_REACH = 5.0  # seconds
_OBJECT_STORE = 128 << 20  # bytes: slices go through it in pieces


def require_ray() -> None:
    """Raise UnsupportedError where ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UnsupportedError("clusters need Ray: pip install 'llamaherd[cluster]'")


def _token_file() -> Path:
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return config / "llamaherd" / "cluster-token"


def read_token() -> str:
    """The cluster's token: LLAMAHERD_CLUSTER_TOKEN, else what start() or join() has kept here; or empty."""
    token = os.environ.get("LLAMAHERD_CLUSTER_TOKEN", "")
    if not token:
        with suppress(OSError):
            token = _token_file().read_text().strip()
    return token


def _keep_token(token: str) -> None:
    path = _token_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(token + "\n")


def environment(token: str) -> dict[str, str]:
    """What a Ray process needs to know."""
    own = {key: os.environ.get(key, value) for key, value in _SETTINGS.items()}
    if token:
        own |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    return own


def use_token() -> None:
    """Have a Ray client of this process, before it is imported, bear the token."""
    os.environ.update(environment(read_token()))


def reach(address: str) -> str:
    """HOST:PORT of an address where something listens: Ray itself would try for minutes.

    Raises InvalidParameterError, WorkerError.
    """
    host, _, port = address.rpartition(":") if ":" in address else (address, ":", str(PORT))
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidParameterError("cluster", address, "HOST or HOST:PORT of the first machine")
    try:
        socket.create_connection((host, int(port)), timeout=_REACH).close()
    except (OSError, UnicodeError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise WorkerError(
            f"nothing answers at {host}:{port} ({cause}); is `llamaherd cluster start` running there?", cause
        ) from error
    return f"{host}:{port}"


def _listens(host: str, port: int) -> bool:
    with suppress(WorkerError):
        reach(f"{host}:{port}")
        return True
    return False


def start(memory: int, *, speed: float | None = None, host: str | None = None, port: int = PORT) -> str:
    """Begin a cluster on this machine; its token.

    Args:
        memory: bytes that the machine gives.
        speed: bytes of weights that it reads in a second, if that was measured.
        host, port: where the others find it.

    Raises InvalidParameterError, WorkerStartError.
    """
    require_ray()
    if isinstance(port, bool) or not 0 < port < 65536:
        raise InvalidParameterError("port", port, "from 1 to 65535")
    _check_host(host)
    if _listens(host or "127.0.0.1", port):
        raise WorkerStartError(
            f"something listens at port {port} already; if it is a cluster, others can join it, and "
            "`llamaherd cluster stop` ends it; else take another --port"
        )
    token = os.environ.get("LLAMAHERD_CLUSTER_TOKEN") or secrets.token_hex(32)
    arguments = ["--head", f"--port={port}", "--include-dashboard=false"]
    if host is not None:
        arguments.append(f"--node-ip-address={host}")
    _ray_start(arguments, memory, speed, token)
    _keep_token(token)
    return token


def _check_host(host: str | None) -> None:
    """Raise InvalidParameterError if that is no name or address of this machine."""
    if host is None:
        return
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        raise InvalidParameterError("host", host, "a name or address of this machine") from error


def join(address: str, memory: int, *, speed: float | None = None, host: str | None = None) -> None:
    """Add this machine to a cluster; see start().

    Raises WorkerError: there is none, or it does not let us in.
    """
    require_ray()
    _check_host(host)
    arguments = [f"--address={reach(address)}"]
    if host is not None:
        arguments.append(f"--node-ip-address={host}")
    token = read_token()
    _ray_start(arguments, memory, speed, token)
    if token:
        _keep_token(token)


def _ray_start(arguments: Sequence[str], memory: int, speed: float | None, token: str) -> None:
    given = {RESOURCE: memory >> 20, SPEED: int((speed or 0) / 1e6)}
    resources = json.dumps({name: amount for name, amount in given.items() if amount})
    command = [
        "start", *arguments, f"--resources={resources}", f"--object-store-memory={_OBJECT_STORE}",
        "--disable-usage-stats", "--include-log-monitor=false",
    ]  # fmt: skip
    _run(command, environment(token), "Ray did not start")


def stop() -> None:
    """End all Ray processes of this user on this machine, those of other clusters and projects as well."""
    require_ray()
    _run(["stop"], {}, "Ray did not stop")


def _run(arguments: Sequence[str], own: Mapping[str, str], failure: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", *arguments],
        env=os.environ | own,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stderr + "\n" + done.stdout).splitlines() if line.strip()]
        telling = [line for line in lines if "rror" in line or "ailed" in line or "token" in line.lower()]
        cause = (telling or lines or ["it says nothing"])[-1]
        raise WorkerStartError(f"{failure}: {cause}", "\n".join(lines[-20:]))
