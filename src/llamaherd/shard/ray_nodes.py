"""The machines of a Ray cluster.

A machine takes part with a resource, "llamaherd_mib": the MiB that it gives.
"""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import dataclass

import ray
import ray.exceptions

from ..errors import WorkerError
from .plan import Node
from .ray_processes import RESOURCE, SPEED, reach

__all__ = ["NAMESPACE", "ClusterNode", "connect", "nodes_of"]

NAMESPACE = "llamaherd"
_MIB = 1 << 20
_HOP = 0.4e-3  # seconds that two processes take to pass something on, beside the way


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A machine of the cluster.

    Attributes:
        id: Ray's.
        name: host name.
        address: its IP address.
        memory, free: bytes that it gives; of them those that no stage has.
        speed: bytes of weights that it reads in a second; 0 if that was not measured.
        latency: seconds to it, from here; 0 if that was not measured.
    """

    id: str
    name: str
    address: str
    memory: int
    free: int
    speed: float = 0.0
    latency: float = 0.0

    def as_planned(self, own: int = 0) -> Node:
        """As a node of a plan, with ``own`` bytes more than are free."""
        speed = {"bandwidth": self.speed} if self.speed else {}
        return Node(self.id, self.free + own, latency=self.latency + _HOP, **speed)


def connect(address: str) -> None:
    """Join a cluster as a client of it; ``ray_processes.use_token`` comes before this module is imported.

    Raises WorkerError: there is none, or it does not let us in.
    """
    if ray.is_initialized():
        return
    address = reach(address)
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.WARNING,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise WorkerError(
            f"no cluster lets us in at {address}: {str(error).splitlines()[0]}; is `llamaherd cluster start` "
            "running there, and LLAMAHERD_CLUSTER_TOKEN the one that it printed?",
            str(error),
        ) from error


def nodes_of(*, latency: bool = False) -> list[ClusterNode]:
    """The machines that give memory, in the order of their addresses; latency is measured on demand."""
    free = _free_by_node()
    found = []
    for node in ray.nodes():
        memory = int(node.get("Resources", {}).get(RESOURCE, 0)) * _MIB
        if node["Alive"] and memory:
            found.append(
                ClusterNode(
                    node["NodeID"], node["NodeManagerHostname"], node["NodeManagerAddress"], memory,
                    min(memory, free.get(node["NodeID"], 0)),
                    1e6 * node["Resources"].get(SPEED, 0),
                    _latency(node["NodeManagerAddress"], node["NodeManagerPort"]) if latency else 0.0,
                )
            )  # fmt: skip
    return sorted(found, key=lambda n: (n.address, n.id))


def _latency(address: str, port: int) -> float:
    """Seconds from here to a machine: half of what the best of three handshakes takes."""
    best = 1.0
    for _ in range(3):
        began = time.perf_counter()
        try:
            socket.create_connection((address, port), timeout=best).close()
        except OSError:
            break
        best = min(best, time.perf_counter() - began)
    return best / 2


def _free_by_node() -> dict[str, int]:
    from ray._private.state import available_resources_per_node

    return {i: int(r.get(RESOURCE, 0)) * _MIB for i, r in available_resources_per_node().items()}
