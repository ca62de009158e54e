"""Which machine holds which layers, and how fast that will be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import CapacityError, InvalidParameterError
from .costs import ModelCosts

__all__ = ["Node", "Plan", "Share", "even_cuts", "plan"]

_BANDWIDTH = 20e9  # bytes/s that a machine's memory gives, unless it was measured
_LATENCY = 0.5e-3  # seconds of a hop on a local network
_LINK = 110e6  # bytes/s of gigabit Ethernet


@dataclass(frozen=True)
class Node:
    """A machine.

    Attributes:
        name: for people.
        memory: bytes that it gives.
        bandwidth: bytes a second that it reads weights with; decoding is bound by that.
        latency: seconds from it to the next.
        link: bytes a second of its network.
    """

    name: str
    memory: int
    bandwidth: float = _BANDWIDTH
    latency: float = _LATENCY
    link: float = _LINK

    def __post_init__(self) -> None:
        for name in ("bandwidth", "link"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidParameterError(name, getattr(self, name), "bytes a second, more than 0")
        if not 0 <= self.latency < math.inf:
            raise InvalidParameterError("latency", self.latency, "seconds, at least 0")


@dataclass(frozen=True)
class Share:
    """What one node holds and how long it takes.

    Attributes:
        start, end: layers [start, end).
        weights, kv_cache, compute: bytes.
        seconds: to compute one token of one sequence.
    """

    node: Node
    start: int
    end: int
    weights: int
    kv_cache: int
    compute: int
    seconds: float

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.weights + self.kv_cache + self.compute

    @property
    def reserved(self) -> int:
        """The same in whole MiB, as machines give memory."""
        return -(-self.total // 2**20) * 2**20


@dataclass(frozen=True)
class Plan:
    """A model over nodes.

    Attributes:
        shares: in the order of the layers; nodes that get no layer are left out.
        hop_seconds: that a token's hidden states take between two stages, and the logits to the head.
        sequences: that were asked for.
    """

    costs: ModelCosts
    shares: tuple[Share, ...]
    hop_seconds: float
    n_ctx: int
    sequences: int

    @property
    def cuts(self) -> list[int]:
        """Layer numbers from 0 to the number of layers: stage i holds [cuts[i], cuts[i + 1])."""
        return [share.start for share in self.shares] + [self.shares[-1].end]

    @property
    def alone(self) -> float:
        """Tokens a second of one sequence: every stage waits for the one before."""
        return 1 / (sum(s.seconds for s in self.shares) + len(self.shares) * self.hop_seconds)

    def together(self, sequences: int) -> float:
        """Tokens a second of so many sequences, one in each step: the slowest stage bounds them."""
        slowest = max(s.seconds for s in self.shares)
        return min(sequences * self.alone, 1 / max(slowest, self.hop_seconds))


def plan(
    costs: ModelCosts,
    nodes: Sequence[Node],
    *,
    n_ctx: int = 4096,
    sequences: int = 1,
    n_ubatch: int = 512,
) -> Plan:
    """Give each node consecutive layers so that all fits and the slowest is as fast as can be.

    Nodes keep their order. The best of all cuts is found by dynamic programming over (nodes, layers).

    Args:
        costs: of the model.
        nodes: the machines.
        n_ctx: tokens of context, which all sequences share.
        sequences: that are to be under way; only predictions depend on it.
        n_ubatch: tokens of a forward pass, for the compute buffers.

    Raises:
        InvalidParameterError: no nodes, or sizes that are not positive.
        CapacityError: the nodes have not enough memory together, or no cut fits.
    """
    if not nodes:
        raise InvalidParameterError("nodes", nodes, "at least one")
    for name, value in (("n_ctx", n_ctx), ("sequences", sequences), ("n_ubatch", n_ubatch)):
        if value < 1:
            raise InvalidParameterError(name, value, "at least 1")
    layers = len(costs.layers)
    starts = [layer for layer in range(layers) if layer % costs.period == 0] + [layers]
    # best[end]: (seconds of the slowest, shares) for the first nodes and layers [0, end)
    best: dict[int, tuple[float, int, tuple[Share, ...]]] = {0: (0.0, 0, ())}
    for node in nodes:
        better = dict(best)
        for start, (slowest, count, shares) in best.items():
            for end in starts:
                if end <= start:
                    continue
                share = _share(costs, node, start, end, n_ctx, n_ubatch)
                if share.total > node.memory:
                    break  # more layers take more
                found = (max(slowest, share.seconds), count + 1, (*shares, share))
                if end not in better or found[:2] < better[end][:2]:
                    better[end] = found
        best = better
    if layers not in best:
        raise CapacityError(_too_little(costs, nodes, n_ctx, n_ubatch), sum(n.memory for n in nodes))
    hop = nodes[0].latency + 4 * costs.n_embd / nodes[0].link
    return Plan(costs, best[layers][2], hop, n_ctx, sequences)


def _share(costs: ModelCosts, node: Node, start: int, end: int, n_ctx: int, n_ubatch: int) -> Share:
    weights = costs.weights(start, end)
    return Share(
        node=node,
        start=start,
        end=end,
        weights=weights,
        kv_cache=costs.kv_cache(start, end, n_ctx),
        compute=costs.compute(start, end, n_ubatch),
        seconds=costs.read(start, end) / node.bandwidth,
    )


def _too_little(costs: ModelCosts, nodes: Sequence[Node], n_ctx: int, n_ubatch: int) -> str:
    layers = len(costs.layers)
    needed = sum(
        (costs.weights(0, layers), costs.kv_cache(0, layers, n_ctx), costs.compute(0, layers, n_ubatch))
    )
    have = sum(node.memory for node in nodes)
    if have < needed:
        return (
            f"{costs.name} needs {_size(needed)} with n_ctx = {n_ctx}, the {len(nodes)} nodes give "
            f"{_size(have)}; add nodes, or take a smaller n_ctx or quantisation"
        )
    return (
        f"{costs.name} would fit into {_size(have)}, but not layer by layer into these nodes: each keeps "
        f"compute buffers too, the last one {_size(costs.compute(layers - 1, layers, n_ubatch))} beside its "
        f"head of {_size(costs.head)}; the largest layer takes {_size(max(costs.layers))}"
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.0f} MiB"


def even_cuts(costs: ModelCosts, stages: int) -> list[int]:
    """Cuts into so many stages of one machine, about equally slow.

    Raises InvalidParameterError: there are fewer places to cut.
    """
    places = -(-len(costs.layers) // costs.period)
    if not 1 <= stages <= places:
        raise InvalidParameterError("stages", stages, f"from 1 to {places}, the layers of {costs.name}")
    found = plan(costs, [Node(str(i), 1 << 62) for i in range(stages)], n_ctx=1, n_ubatch=1).cuts
    while len(found) <= stages:  # a stage more does not make the slowest faster, but was asked for
        widest = max(range(len(found) - 1), key=lambda i: found[i + 1] - found[i])
        middle = (found[widest] + found[widest + 1]) // 2 // costs.period * costs.period
        found.insert(widest + 1, middle)
    return found
