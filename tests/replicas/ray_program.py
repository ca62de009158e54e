"""What test_ray_serve.py runs: a cluster of three machines on this one, and servers with replicas on it.

python -m tests.replicas.ray_program MODEL FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from llamaherd.shard import ray_processes

os.environ |= ray_processes.environment("") | {
    "LLAMAHERD_SLICES": sys.argv[2],
    "XDG_CONFIG_HOME": sys.argv[2],
}

import ray
from ray.cluster_utils import Cluster

from llamaherd import GenerationRequest, Herd, Model, SamplingConfig
from llamaherd.engine.context import Context
from llamaherd.replicas import ray_serve
from llamaherd.shard import ray_nodes

PATH = Path(sys.argv[1])
MEMORY = 6  # MiB that each machine gives
TOKENS = 220
WANTED: list[str] = []


def requests() -> list[dict[str, Any]]:
    return [
        {"prompt": f"request {i}", "max_tokens": TOKENS, "ignore_eos": True, "seed": i, "temperature": i % 2}
        for i in range(8)
    ]


def expected() -> list[str]:
    asked = [
        GenerationRequest(
            r["prompt"], max_tokens=r["max_tokens"], ignore_eos=True,
            sampling=SamplingConfig(seed=r["seed"], temperature=r["temperature"]),
        )
        for r in requests()
    ]  # fmt: skip
    with Model.load(PATH) as model, Herd(Context(model, n_ctx=4096, n_seq_max=8, kv_unified=False)) as herd:
        return [herd.generate(r).text for r in asked]


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.1)


class Server:
    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = httpx.get(f"{self.url}/status", timeout=30).json()["models"][0]
        return status

    def replicas(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.status()["replicas"]
        return found

    def stream(self, body: dict[str, Any], on_text: Callable[[], object] = lambda: None) -> str:
        text = ""
        with httpx.stream(
            "POST", f"{self.url}/v1/completions", json=body | {"stream": True}, timeout=120
        ) as r:
            assert r.status_code == 200, r.read()
            for line in r.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    text += event["choices"][0]["text"] if event["choices"] else ""
                    on_text()
        return text


@contextmanager
def serving(address: str, *arguments: str) -> Iterator[Server]:
    command = [
        sys.executable, "-m", "llamaherd", "serve", str(PATH), "--cluster", address, "--port", "0",
        "--max-sequences", "8", "--set", "kv_unified=false", "--log-format", "text", *arguments,
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    url = ""
    for line in process.stderr:
        if "listening at" in line:
            url = line.split()[-1]
            break
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True)
    reader.start()
    server = Server(process, url)
    try:
        wait_for(lambda: process.poll() is not None or httpx.get(f"{url}/health").status_code == 200, 60)
        assert process.poll() is None, log
        yield server
    except BaseException:
        print(*log, file=sys.stderr)
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 0
        reader.join(10)
        assert not any("Traceback" in line or "epoll_pwait" in line for line in log), log


def all_at_once(server: Server, disturb: Callable[[], object] = lambda: None) -> list[str]:
    """The texts of all requests; ``disturb`` is called once they all run."""
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(8) as pool:
        texts = [pool.submit(server.stream, r, begun.release) for r in requests()]
        for _ in range(40):
            begun.acquire(timeout=60)
        disturb()
        found = [text.result() for text in texts]
    for text, other in zip(found, WANTED, strict=True):
        assert text == other, (text, other)
    return found


def a_machine_without_the_file() -> None:
    """It gets a copy, goes on where a broken transfer stopped, and keeps nothing that is damaged."""
    source = ray.remote(ray_serve._ModelSource).remote(str(PATH))
    whole = PATH.read_bytes()
    assert ray_serve._fetch(str(PATH), source) == str(PATH)
    copy = Path(ray_serve._fetch("/nowhere/six.gguf", source))
    assert copy.read_bytes() == whole
    assert ray_serve._fetch("/nowhere/six.gguf", source) == str(copy)
    arriving = copy.with_suffix(".arriving")
    for begun in (whole[:1000], b"something else", b""):
        copy.unlink()
        arriving.write_bytes(begun)
        assert ray_serve._fetch("/nowhere/six.gguf", source) == str(copy)
        assert copy.read_bytes() == whole
    copy.write_bytes(b"forged" + whole[6:])
    assert Path(ray_serve._fetch("/nowhere/six.gguf", source)).read_bytes() == whole


def main() -> None:
    cluster = Cluster()
    for _ in range(3):
        cluster.add_node(
            num_cpus=1, resources={ray_processes.RESOURCE: MEMORY}, object_store_memory=80 << 20,
            include_dashboard=False,
        )  # fmt: skip
    WANTED[:] = wanted = expected()
    with serving(cluster.address, "--replicas", "2", "--n-ctx", "4096") as server:
        ray_nodes.connect(cluster.address)
        assert len(server.replicas()) == 2
        assert all_at_once(server) == wanted
        wait_for(lambda: all(r["prefilled_tokens"] for r in server.replicas()))

        # a prompt's beginning finds the replica that has it
        before = {r["name"]: r["reused_tokens"] for r in server.replicas()}
        for turn in range(5):
            server.stream(
                {"prompt": "the same beginning, again and again. " * 10 + str(turn), "max_tokens": 4}
            )
        wait_for(lambda: sum(r["reused_tokens"] - before[r["name"]] > 0 for r in server.replicas()) == 1)

        # the worker of one dies, then a whole replica, then its machine
        def kill_worker() -> None:
            os.kill(server.replicas()[0]["pid"], signal.SIGKILL)

        assert all_at_once(server, kill_worker) == wanted
        wait_for(lambda: server.replicas()[0]["restarts"] == 1)

        def kill_replica() -> None:
            psutil.Process(server.replicas()[1]["pid"]).parent().kill()

        began = time.monotonic()
        assert all_at_once(server, kill_replica) == wanted
        print(f"8 streams over a killed replica took {time.monotonic() - began:.1f} s", flush=True)
        wait_for(lambda: server.status()["restarts"] == 2 and all(r["ready"] for r in server.replicas()))

        # one is frozen: it is noticed, and Serve puts another in its place
        def freeze_replica() -> None:
            frozen.append(psutil.Process(server.replicas()[1]["pid"]).parent())
            frozen[0].suspend()

        frozen: list[psutil.Process] = []
        began = time.monotonic()
        assert all_at_once(server, freeze_replica) == wanted
        print(f"8 streams over a frozen replica took {time.monotonic() - began:.1f} s", flush=True)
        frozen[0].kill()
        wait_for(lambda: server.status()["restarts"] == 3 and all(r["ready"] for r in server.replicas()))

        def kill_machine() -> None:
            # the one that holds a replica, and not the head with Serve's controller
            for node in cluster.worker_nodes:
                pids = {p.pid for p in psutil.Process(node.all_processes["raylet"][0].process.pid).children()}
                if any(psutil.Process(r["pid"]).ppid() in pids for r in server.replicas()):
                    cluster.remove_node(node, allow_graceful=False)
                    return
            raise AssertionError("no replica is on a machine beside the head")

        began = time.monotonic()
        assert all_at_once(server, kill_machine) == wanted
        print(f"8 streams over a lost machine took {time.monotonic() - began:.1f} s", flush=True)
        wait_for(lambda: server.status()["restarts"] == 4 and all(r["ready"] for r in server.replicas()), 90)
    wait_for(lambda: all(n.free == n.memory for n in ray_nodes.nodes_of()))  # all is given back
    a_machine_without_the_file()

    refused = subprocess.run(
        [sys.executable, "-m", "llamaherd", "serve", str(PATH), "--cluster", cluster.address, "--port", "0",
         "--replicas", "50", "--n-ctx", "4096"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert refused.returncode == 1, refused
    assert "room for" in refused.stderr, refused.stderr
    assert "Traceback" not in refused.stderr, refused.stderr

    cluster.add_node(num_cpus=1, resources={ray_processes.RESOURCE: MEMORY}, object_store_memory=80 << 20)

    # a model that no machine has room for: each replica is cut over several
    big = ("--n-ctx", "8192")
    cluster.add_node(num_cpus=1, resources={ray_processes.RESOURCE: MEMORY}, object_store_memory=80 << 20)
    while len(ray_nodes.nodes_of()) < 4:
        time.sleep(0.1)
    with serving(cluster.address, "--replicas", "2", *big) as server:
        assert all_at_once(server) == wanted
        wait_for(lambda: len(server.status()["stages"]) == 4)
    ray.shutdown()
    cluster.shutdown()
    print("all is well", flush=True)


if __name__ == "__main__":
    main()
