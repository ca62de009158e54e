"""What the pipelines of a cluster say of themselves, and what is asked of them: an actor that all know."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from ..errors import LlamaherdError, WorkerError
from .link import RemoteChain
from .pipeline import Pipeline
from .ray_cluster import RayStages
from .ray_nodes import NAMESPACE

__all__ = ["Reporter", "read_board", "rebalance"]

_POST_EVERY = 2.0  # seconds


class _Board:
    """What the pipelines of a cluster say of themselves, for whoever asks."""

    def __init__(self) -> None:
        self._posts: dict[str, tuple[float, dict[str, Any]]] = {}
        self._wish = 0

    def post(self, name: str, news: dict[str, Any]) -> int:
        """Say it; it is forgotten after some time. The number of the newest wish to be planned anew."""
        self._posts[name] = (time.monotonic(), news)
        return self._wish

    def wish(self) -> int:
        """Have all pipelines planned anew; the wish's number."""
        self._wish += 1
        return self._wish

    def newest(self) -> int:
        """The number of the newest wish."""
        return self._wish

    def read(self) -> list[dict[str, Any]]:
        """What was said lately."""
        now = time.monotonic()
        self._posts = {n: p for n, p in self._posts.items() if now - p[0] < 3 * _POST_EVERY}
        return [news for _, news in self._posts.values()]


def _board() -> Any:
    options: dict[str, Any] = {
        "name": "board", "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True, "num_cpus": 0,
    }  # fmt: skip
    return ray.remote(_Board).options(**options).remote()


def read_board() -> list[dict[str, Any]]:
    """A look at every pipeline of the cluster, as `publish` has posted it."""
    found: list[dict[str, Any]] = ray.get(_board().read.remote(), timeout=20)
    return found


def rebalance(seconds: float = 120.0) -> list[dict[str, Any]]:
    """Have every pipeline of the cluster divided anew among its machines.

    Returns:
        What each has posted since; ``["rebalance"]`` says whether it "moved", or its "error".

    Raises WorkerError: some have not answered within that time.
    """
    waiting = read_board()
    wish = ray.get(_board().wish.remote(), timeout=20)
    deadline = time.monotonic() + seconds
    while True:
        posts = read_board()
        done = [post for post in posts if post["rebalance"]["wish"] >= wish]
        if len(done) == len(posts) >= min(1, len(waiting)):
            return done
        if time.monotonic() > deadline:
            raise WorkerError(
                f"{len(posts) - len(done)} of {len(posts)} pipelines did not answer within {seconds:.0f} s",
                "no answer",
            )
        time.sleep(0.3)


class Reporter:
    """Posts what a pipeline does to the cluster's board, and has it planned anew when somebody wishes so.

    A thread of its own, until the pipeline is closed.
    """

    def __init__(self, pipeline: Pipeline, deployment: RayStages) -> None:
        self._pipeline = pipeline
        self._deployment = deployment
        self._name = f"{os.getpid()}-{id(pipeline)}"
        self._rebalance: dict[str, Any] = {"wish": 0, "moved": False, "error": None}
        threading.Thread(target=self._run, name="board", daemon=True).start()

    def _run(self) -> None:
        pipeline = self._pipeline
        tokens, then = pipeline.computed_tokens, time.monotonic()
        with contextlib.suppress(ray.exceptions.RayError):  # wishes of before are not meant
            self._rebalance["wish"] = ray.get(_board().newest.remote(), timeout=20)
        while not pipeline.memory.closed:
            now, count = time.monotonic(), pipeline.computed_tokens
            rate = (count - tokens) / max(now - then, 1e-3)
            tokens, then = count, now
            try:
                wish = ray.get(_board().post.remote(self._name, self._news(rate)), timeout=20)
            except ray.exceptions.RayError:
                wish = 0
            if wish > self._rebalance["wish"]:
                self._plan_anew(wish)
            else:
                time.sleep(_POST_EVERY)

    def _plan_anew(self, wish: int) -> None:
        moved, error = False, None
        try:
            moved = self._pipeline.rebalance()
        except LlamaherdError as failure:
            error = str(failure)
        self._rebalance = {"wish": wish, "moved": moved, "error": error}

    def _news(self, rate: float) -> dict[str, Any]:
        chain = self._pipeline.chain
        assert isinstance(chain, RemoteChain)
        return {
            "model": Path(self._deployment.path).name,
            "tokens_per_second": rate,
            "recoveries": self._pipeline.recoveries,
            "rebalance": self._rebalance,
            "stages": [
                {
                    "node": node,
                    "layers": [s.facts.start, s.facts.end],
                    "weights": s.facts.size,
                    "latency": s.latency,
                    "used_cells": s.used_cells,
                    "n_cells": s.facts.n_cells,
                }
                for node, s in zip(self._deployment.places, chain.status(), strict=False)
            ],
        }
