"""From a model's file to a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from .. import files
from ..engine.model import Model
from .costs import costs_of_file
from .link import RemoteChain
from .local import LocalStages
from .pipeline import Pipeline
from .plan import even_cuts

__all__ = ["open_stages"]


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
    with files.open(path) as model:
        cuts = even_cuts(costs_of_file(model), stages)
    deployment = LocalStages(
        path,
        cuts,
        model_params=dict(model_params or {}),
        context_params=context_params,
        activations=activations,
    )
    vocabulary = Model.load(path, vocab_only=True)
    try:
        return Pipeline(RemoteChain(deployment), vocabulary)
    except BaseException:
        vocabulary.close()
        raise
