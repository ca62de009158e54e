"""From a model's file to a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np

from .. import files
from ..engine.model import Model
from ..engine.parameters import split_parameters
from ..errors import InvalidParameterError
from . import ray_processes
from .costs import costs_of_file
from .link import Deployment, RemoteChain
from .local import LocalStages
from .pipeline import Pipeline
from .plan import even_cuts
from .wire import ACTIVATIONS

__all__ = ["open_cluster", "open_stages"]


def open_stages(
    path: str | PathLike[str],
    stages: int,
    *,
    model_params: Mapping[str, Any] | None = None,
    activations: str = "f32",
    **context_params: Any,
) -> Pipeline:
    """A model as a pipeline of local processes, for a Herd or a Scheduler.

    Args:
        path: a GGUF model of an architecture that can be cut (docs/sharding-table.md).
        stages: how many; about equally slow.
        model_params: llama.cpp's own model parameters by their names, the same for every stage.
        activations: how hidden states travel: "f32" (exact), "f16" or "q8_0".
        context_params: llama.cpp's context parameters, likewise.

    Raises:
        ModelNotFoundError, FileError, UnsupportedFileError: no such file, or none that can be cut.
        InvalidParameterError: more stages than places to cut.
        WorkerStartError, ModelLoadError, ContextError: a stage cannot be started.
    """
    settings = _settings(path, model_params, activations, context_params)
    if isinstance(stages, bool) or not isinstance(stages, (int, np.integer)):
        raise InvalidParameterError("stages", stages, "a number of processes")
    with files.open(path) as model:
        cuts = even_cuts(costs_of_file(model), int(stages))
    return _open(path, LocalStages(path, cuts, **settings))


def open_cluster(
    path: str | PathLike[str],
    address: str,
    *,
    model_params: Mapping[str, Any] | None = None,
    activations: str = "f32",
    few_machines: bool = False,
    **context_params: Any,
) -> Pipeline:
    """A model as a pipeline over the machines of a cluster that ``llamaherd cluster start`` has begun.

    Args:
        path: of a GGUF model, on this machine.
        address: HOST or HOST:PORT of the first machine.
        model_params, activations, context_params: as of open_stages().
        few_machines: take as few as there must be, not as many as make it faster.

    Raises:
        UnsupportedError: Ray is not installed.
        WorkerError: there is no cluster, or it does not let us in.
        CapacityError: the model does not fit its machines.
        As open_stages() besides.
    """
    settings = _settings(path, model_params, activations, context_params)
    ray_processes.require_ray()
    ray_processes.use_token()
    from . import ray_board, ray_cluster, ray_nodes

    ray_nodes.connect(address)
    deployment = ray_cluster.RayStages(path, few_machines=few_machines, **settings)
    pipeline = _open(path, deployment)
    ray_board.Reporter(pipeline, deployment)
    return pipeline


def _settings(
    path: object, model_params: object, activations: object, context_params: Mapping[str, Any]
) -> dict[str, Any]:
    """What a deployment takes, checked here: in a stage's process it would be too late."""
    if not isinstance(path, (str, PathLike)):
        raise InvalidParameterError("path", path, "a path of a model's file")
    if model_params is not None and not isinstance(model_params, Mapping):
        raise InvalidParameterError("model_params", model_params, "values by llama.cpp's names")
    if activations not in ACTIVATIONS:
        raise InvalidParameterError("activations", activations, f"one of {', '.join(ACTIVATIONS)}")
    given = {**(model_params or {}), **context_params}
    for name in given:
        if not isinstance(name, str):
            raise InvalidParameterError("model_params", name, "values by llama.cpp's names")
    # what numpy has computed travels as a number
    plain = {name: v.item() if isinstance(v, np.generic) else v for name, v in given.items()}
    model, context = split_parameters(plain, of="llama.cpp")
    return {"model_params": model, "context_params": context, "activations": activations}


def _open(path: str | PathLike[str], deployment: Deployment) -> Pipeline:
    vocabulary = Model.load(path, vocab_only=True)
    try:
        return Pipeline(RemoteChain(deployment), vocabulary)
    except BaseException:
        vocabulary.close()
        raise
