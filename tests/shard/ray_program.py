"""What test_ray.py runs: a cluster of three machines on this one, in a process of its own.

python -m tests.shard.ray_program MODEL SLICES
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from llamaherd.shard import ray_processes

os.environ |= ray_processes.environment("") | {"LLAMAHERD_SLICES": sys.argv[2]}

import ray
from ray.cluster_utils import Cluster

from llamaherd import Herd
from llamaherd.config import SamplingConfig
from llamaherd.engine.context import Context
from llamaherd.engine.model import Model
from llamaherd.errors import CapacityError, WorkerStartError
from llamaherd.shard import ray_board, ray_cluster, ray_nodes
from llamaherd.shard.link import RemoteChain
from llamaherd.shard.pipeline import Pipeline
from llamaherd.types import GenerationRequest

from .conftest import SETTINGS, batch_of, conversation, equal

PATH = Path(sys.argv[1])
SLICES = Path(sys.argv[2])


def deployment(path: Path, **context: object) -> ray_cluster.RayStages:
    # every machine's slices lie apart from the head's, as on machines of their own
    return ray_cluster.RayStages(
        path, context_params=SETTINGS | {"kv_unified": False} | context, slices=str(SLICES / "machines")
    )


def move_while_serving(cluster: Cluster, path: Path) -> None:
    """A machine joins while streams run: on request it takes part, and nobody notices more than a pause."""
    requests = [
        GenerationRequest(
            f"request {i}", max_tokens=480, n=1 + i % 2, ignore_eos=True,
            sampling=SamplingConfig(seed=i, temperature=0.8 * (i % 2)),
        )
        for i in range(4)
    ]  # fmt: skip
    size = {"n_ctx": 4096}  # 512 for each sequence
    with Model.load(path) as model, Herd(Context(model, **SETTINGS | size, kv_unified=False)) as herd:
        expected = [herd.submit(r).result(120).completions for r in requests]
    stages = deployment(path, **size)
    pipeline = Pipeline(RemoteChain(stages), Model.load(path, vocab_only=True))
    ray_board.Reporter(pipeline, stages)
    cuts = stages.cuts
    assert not pipeline.rebalance()
    cluster.add_node(
        num_cpus=1, resources={ray_processes.RESOURCE: 8, ray_processes.SPEED: 40_000},
        object_store_memory=80 << 20,
    )  # fmt: skip
    while len(ray_nodes.nodes_of()) < 4 or not (posts := ray_board.read_board()):
        time.sleep(0.1)
    with Herd(pipeline) as herd:
        handles = [herd.submit(r) for r in requests]
        next(iter(handles[0]))
        assert not any(handle.done for handle in handles)
        began = time.monotonic()
        (post,) = ray_board.rebalance()
        print(f"divided anew after {time.monotonic() - began:.1f} s", flush=True)
        assert post["rebalance"] | {"wish": 0} == {"wish": 0, "moved": True, "error": None}
        assert [handle.result(120).completions for handle in handles] == expected
    assert stages.cuts != cuts, cuts
    assert len(stages.cuts) > len(cuts)
    assert [s["layers"][0] for s in post["stages"]] == stages.cuts[:-1]
    assert [s["layers"][0] for s in posts[0]["stages"]] == cuts[:-1]


def main() -> None:
    cluster = Cluster()
    for _ in range(3):
        cluster.add_node(
            num_cpus=1, resources={ray_processes.RESOURCE: 8}, object_store_memory=80 << 20,
            include_dashboard=False,
        )  # fmt: skip
    ray_nodes.connect(cluster.address)
    nodes = ray_nodes.nodes_of()
    assert [n.memory for n in nodes] == [8 << 20] * 3, nodes
    whole_model = Model.load(PATH)
    whole = Context(whole_model, **SETTINGS, kv_unified=False)

    # a model that is nowhere but here: its slices are sent
    hidden = PATH.rename(PATH.with_name("only-here.gguf"))
    stages = deployment(hidden)
    print("cuts", stages.cuts, flush=True)
    assert len(set(stages.places)) == len(stages.places) > 1
    pipeline = Pipeline(RemoteChain(stages), Model.load(hidden, vocab_only=True))
    assert all(equal(conversation(whole), conversation(pipeline)))
    arrived = sorted((SLICES / "machines").glob("*.gguf"))
    assert len(arrived) == len(stages.places), arrived

    # a stage is killed
    for engine in (whole, pipeline):
        engine.memory.allocate()
        engine.decode(batch_of(engine, {0: list(range(50))}))
    victim = pipeline.chain.status()[1]
    os.kill(victim.pid, 9)
    began = time.monotonic()
    last = {0: [7]}
    assert np.array_equal(whole.decode(batch_of(whole, last)), pipeline.decode(batch_of(pipeline, last)))
    print(f"a killed stage was back after {time.monotonic() - began:.1f} s", flush=True)
    assert pipeline.chain.status()[1].pid != victim.pid

    # a whole machine goes: its stage moves to one that has room
    workers = {n.node_id: n for n in cluster.worker_nodes}
    index = next(i for i, place in enumerate(stages.places) if place in workers)
    place = stages.places[index]
    cluster.add_node(num_cpus=1, resources={ray_processes.RESOURCE: 8}, object_store_memory=80 << 20)
    pid = pipeline.chain.status()[index].pid
    cluster.remove_node(workers[place], allow_graceful=False)
    while psutil.pid_exists(pid):
        time.sleep(0.05)
    began = time.monotonic()
    assert np.array_equal(whole.decode(batch_of(whole, last)), pipeline.decode(batch_of(pipeline, last)))
    print(f"a lost machine's stage was back after {time.monotonic() - began:.1f} s", flush=True)
    assert stages.places[index] != place
    pipeline.close()

    # a slice that is not what it is called is not run
    arrived[0].write_bytes(b"forged" + arrived[0].read_bytes()[6:])
    with pytest.raises(WorkerStartError, match="another slice"):
        RemoteChain(deployment(hidden))
    arrived[0].unlink()
    arrived[0].with_suffix(".arriving").write_bytes(b"the beginning of something else")
    with Pipeline(RemoteChain(deployment(hidden)), Model.load(hidden, vocab_only=True)) as again:
        whole.memory.clear()
        assert all(equal(conversation(whole), conversation(again)))

    move_while_serving(cluster, hidden)

    # more than all of them give
    with pytest.raises(CapacityError, match="nodes give"):
        deployment(hidden, n_ctx=1 << 20)
    ray.shutdown()
    cluster.shutdown()
    print("all is well", flush=True)


if __name__ == "__main__":
    main()
