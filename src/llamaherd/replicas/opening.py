"""From a worker's settings to its replicas on a cluster."""

from __future__ import annotations

import importlib.util

from ..errors import UnsupportedError
from ..shard import ray_processes
from ..worker.wire import WorkerConfig
from .fleet import Fleet

__all__ = ["open_fleet"]


def open_fleet(config: WorkerConfig, *, name: str, max_buffered_events: int) -> Fleet:
    """The replicas that ``config.replicas`` and ``config.cluster`` ask for; start() places them.

    Takes seconds the first time, to import Ray. Raises UnsupportedError: it is not installed.
    """
    ray_processes.require_ray()
    if importlib.util.find_spec("grpc_reflection") is None:
        raise UnsupportedError("replicas need Ray Serve: pip install 'llamaherd[cluster]'")
    ray_processes.use_token()
    from .ray_serve import ServeLauncher

    launcher = ServeLauncher(config, name)
    return Fleet(config, launcher, name=name, max_buffered_events=max_buffered_events)
