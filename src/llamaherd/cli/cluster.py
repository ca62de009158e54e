"""``llamaherd plan`` and ``llamaherd cluster``: a model over several machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import CapacityError, FileError, InvalidParameterError
from .options import model_path
from .sizes import format_size, parse_size

if TYPE_CHECKING:
    from ..shard.costs import ModelCosts
    from ..shard.plan import Node, Plan

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add this module's commands to ``app``."""
    app.command("plan")(plan_command)
    group = typer.Typer(no_args_is_help=True, help="Begin, join, look at and end a cluster of machines.")
    group.command("start")(start_command)
    group.command("join")(join_command)
    group.command("status")(status_command)
    group.command("rebalance")(rebalance_command)
    group.command("stop")(stop_command)
    app.add_typer(group, name="cluster")


def plan_command(
    model: Annotated[
        str,
        typer.Argument(
            help="A GGUF file, or sizes alone: "
            "llama:layers=126,n_embd=16384,n_heads=128,n_kv_heads=8,n_ff=53248."
        ),
    ],
    nodes: Annotated[
        str | None,
        typer.Option(
            "--nodes",
            help="Machines and the memory that each gives: a:16G,b:8G or 40x8G; @25 adds GB/s of its memory.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", help="HOST[:PORT] of a cluster: its machines, as they were measured."),
    ] = None,
    n_ctx: Annotated[int, typer.Option("--n-ctx", "-c", help="Tokens of context, for all sequences.")] = 4096,
    sequences: Annotated[int, typer.Option("--sequences", help="Sequences under way at once.")] = 8,
    latency: Annotated[
        float, typer.Option("--latency", help="Milliseconds from one node to the next, of --nodes.")
    ] = 0.5,
    link: Annotated[float, typer.Option("--link", help="Gbit/s of the network.")] = 1.0,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write a picture here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Which layers go where, what each machine will hold, and how fast that should be.

    The speeds are predictions: a token reads a stage's weights once, at the machine's memory bandwidth
    (20 GB/s unless said), and its hidden states travel over the network between stages.
    """
    from ..shard.plan import plan

    if (nodes is None) == (cluster is None):
        raise InvalidParameterError("nodes", nodes, "given, or a --cluster in their place")
    wire = link * 1e9 / 8 * 0.88
    machines = _nodes_of(cluster, wire) if nodes is None else _nodes(nodes, latency / 1000, wire)
    found = plan(_costs(model), machines, n_ctx=n_ctx, sequences=sequences)
    if as_json:
        typer.echo(json.dumps(_as_json(found), indent=2))
    else:
        _print(found, machines)
    if svg is not None:
        from ..shard.picture import picture

        try:
            svg.write_text(picture(found), encoding="utf-8")
        except OSError as error:
            raise FileError(svg, f"cannot be written ({error.strerror})") from error


def _costs(text: str) -> ModelCosts:
    from .. import files
    from ..shard.costs import costs_of_file, costs_on_paper

    if ":" in text and "=" in text and not Path(text).exists():
        return costs_on_paper(text)
    with files.open(model_path(text)) as model:
        return costs_of_file(model)


def _nodes(text: str, latency: float, link: float) -> list[Node]:
    """``a:16G,b:8G@25,40x8G`` as nodes."""
    from ..shard.plan import Node

    nodes: list[Node] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, colon, rest = part.rpartition(":")
        size, at, speed = rest.partition("@")
        count = 1
        times, x, each = size.partition("x")
        if not colon and x and times.isdigit():
            count, size = int(times), each
        try:
            bandwidth = float(speed) * 1e9 if at else 20e9
        except ValueError as error:
            raise InvalidParameterError("nodes", part, "NAME:SIZE or NAME:SIZE@GB/s") from error
        if not 1 <= count <= 10_000 or not 0 < bandwidth < 1e15:
            raise InvalidParameterError("nodes", part, "1 to 10000 nodes with a positive speed")
        for _ in range(count):
            own = name or f"node{len(nodes)}"
            nodes.append(Node(own, parse_size(size, "nodes"), bandwidth, latency, link))
    return nodes


def _nodes_of(address: str | None, link: float) -> list[Node]:
    """The machines of a cluster, with what is free and the speeds that were measured when they joined."""
    import dataclasses

    ray_nodes = _connected(address or "127.0.0.1")
    found = ray_nodes.nodes_of(latency=True)
    if not found:
        raise CapacityError("no machine of the cluster gives memory; join some with --memory", 0)
    return [dataclasses.replace(n.as_planned(), name=n.name, link=link) for n in found]


def _connected(address: str) -> Any:
    """`shard.ray_nodes`, as a client of a cluster."""
    from ..shard import ray_processes

    ray_processes.require_ray()
    ray_processes.use_token()
    from ..shard import ray_nodes

    ray_nodes.connect(address)
    return ray_nodes


def _print(plan: Plan, nodes: list[Node]) -> None:
    widest = max(len(s.node.name) for s in plan.shares)
    most = max(s.node.memory for s in plan.shares)
    for share in plan.shares:
        room = max(1, round(40 * share.node.memory / most))
        bar = ""
        for mark, size in (("█", share.weights), ("▓", share.kv_cache), ("▒", share.compute)):
            bar += mark * round(room * size / share.node.memory)
        bar = (bar + "·" * room)[:room]
        typer.echo(
            f"{share.node.name:<{widest}}  layers {share.start:>3} - {share.end - 1:<3} {bar:<40} "
            f"{format_size(share.total)} of {format_size(share.node.memory)}"
        )
    spare = [n.name for n in nodes if n not in [s.node for s in plan.shares]]
    total = sum(s.weights for s in plan.shares)
    kv = sum(s.kv_cache for s in plan.shares)
    typer.echo(f"█ weights {format_size(total)}  ▓ KV cache {format_size(kv)}  ▒ compute buffers")
    if spare:
        typer.echo(f"not needed: {', '.join(spare[:8])}{' ...' if len(spare) > 8 else ''}")
    typer.echo(
        f"predicted: {_rate(plan.alone)} with one sequence, "
        f"{_rate(plan.together(plan.sequences))} with {plan.sequences}"
    )


def _rate(tokens: float) -> str:
    return f"{tokens:.3g} tokens/s"


def _as_json(plan: Plan) -> dict[str, Any]:
    return {
        "model": plan.costs.name,
        "cuts": plan.cuts,
        "n_ctx": plan.n_ctx,
        "stages": [
            {
                "node": s.node.name,
                "layers": [s.start, s.end],
                "weights": s.weights,
                "kv_cache": s.kv_cache,
                "compute": s.compute,
                "memory": s.node.memory,
                "seconds_per_token": s.seconds,
            }
            for s in plan.shares
        ],
        "tokens_per_second": {"1": plan.alone, str(plan.sequences): plan.together(plan.sequences)},
    }


# ---------------------------------------------------------------------------------------- cluster

Memory = Annotated[
    str | None,
    typer.Option("--memory", help="What this machine gives: 8G; half of what is free if left out."),
]
Host = Annotated[str | None, typer.Option("--host", help="This machine's address, as the others see it.")]
Speed = Annotated[
    float | None,
    typer.Option("--speed", help="GB/s with which this machine reads weights; measured if left out (5 s)."),
]


def start_command(
    memory: Memory = None,
    speed: Speed = None,
    host: Host = None,
    port: Annotated[int, typer.Option("--port", help="Where the others find this machine.")] = 6379,
) -> None:
    """Begin a cluster on this machine.

    Prints the command for the others. Its token is what lets machines in: whoever has it can run code on all
    of them. Stages listen at ports that the system chooses; between the machines nothing may be filtered.
    """
    from ..shard import ray_processes

    given = _memory(memory)
    token = ray_processes.start(given, speed=_speed(speed, given), host=host, port=port)
    address = f"{host or _own_address()}:{port}"
    typer.echo(
        "On each of the other machines:\n\n"
        f"  LLAMAHERD_CLUSTER_TOKEN={token} llamaherd cluster join {address} --memory 8G\n\n"
        f"Then here: llamaherd serve MODEL --cluster {address}"
    )


def join_command(
    address: Annotated[str, typer.Argument(metavar="HOST[:PORT]", help="The first machine.")],
    memory: Memory = None,
    speed: Speed = None,
    host: Host = None,
) -> None:
    """Give this machine's memory to a cluster. LLAMAHERD_CLUSTER_TOKEN is the one that `start` printed."""
    from ..shard import ray_processes

    given = _memory(memory)
    ray_processes.require_ray()
    ray_processes.reach(address)  # before the speed is measured
    ray_processes.join(address, given, speed=_speed(speed, given), host=host)
    typer.echo(f"joined {address} with {format_size(given)}")


def status_command(
    address: Annotated[
        str, typer.Argument(metavar="[HOST[:PORT]]", help="The first machine; this one if left out.")
    ] = "127.0.0.1",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The cluster's machines, and what runs on them."""
    import dataclasses

    ray_nodes = _connected(address)
    from ..shard import ray_board

    nodes, pipelines = ray_nodes.nodes_of(latency=True), ray_board.read_board()
    if as_json:
        shown = {"nodes": [dataclasses.asdict(node) for node in nodes], "pipelines": pipelines}
        typer.echo(json.dumps(shown, indent=2))
        return
    for node in nodes:
        typer.echo(
            f"{node.name} ({node.address}, {node.id[:8]})  gives {format_size(node.memory)}, "
            f"{format_size(node.free)} free, "
            + (f"reads {node.speed / 1e9:.1f} GB/s, " if node.speed else "")
            + f"{1000 * node.latency:.2f} ms away"
        )
        for pipeline in pipelines:
            for stage in pipeline["stages"]:
                if stage["node"] == node.id:
                    first, last = stage["layers"][0], stage["layers"][1] - 1
                    typer.echo(
                        f"  {pipeline['model']}: layers {first} - {last}, {format_size(stage['weights'])}, "
                        f"KV {stage['used_cells']}/{stage['n_cells']}, {1000 * stage['latency']:.1f} ms away"
                    )
    for pipeline in pipelines:
        typer.echo(f"{pipeline['model']}: {pipeline['tokens_per_second']:.1f} tokens/s")
    if not nodes:
        typer.echo("no machine gives memory; join some")


def rebalance_command(
    address: Annotated[
        str, typer.Argument(metavar="[HOST[:PORT]]", help="The first machine; this one if left out.")
    ] = "127.0.0.1",
) -> None:
    """Divide the models that are served anew among the machines that there are now.

    After machines have joined. Requests wait for some seconds meanwhile, and lose nothing.
    """
    _connected(address)
    from ..shard import ray_board

    failed = False
    for pipeline in ray_board.rebalance():
        layers = ", ".join(f"{first} - {end - 1}" for first, end in (s["layers"] for s in pipeline["stages"]))
        result = pipeline["rebalance"]
        failed |= result["error"] is not None
        what = result["error"] or ("moved" if result["moved"] else "is as it was")
        typer.echo(f"{pipeline['model']}: {what}; layers {layers}")
    if failed:
        raise typer.Exit(1)


def stop_command() -> None:
    """End this machine's part of the cluster; on the first machine, all of it.

    That is all Ray processes of this user here: other clusters and projects that use Ray lose theirs as well.
    """
    from ..shard import ray_processes

    ray_processes.stop()


def _memory(text: str | None) -> int:
    if text is not None:
        return parse_size(text, "memory")
    from ..engine.cpus import available_memory

    return (available_memory() or 2 << 30) // 2


def _speed(given: float | None, memory: int) -> float | None:
    """Bytes a second: what was said, else measured, if the machine gives any memory."""
    if given is not None:
        if not 0 < given < 1e6:
            raise InvalidParameterError("speed", given, "GB/s, more than 0")
        return given * 1e9
    if not memory >> 20:
        return None
    from ..shard.speed import measure_speed

    return measure_speed()


def _own_address() -> str:
    """The address that this machine is seen with from elsewhere; nothing is sent."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
