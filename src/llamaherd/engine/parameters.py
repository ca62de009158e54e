"""llama.cpp's own parameters by name, for whoever takes them from a user before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UnknownParameterError
from ..native import params as native
from .model import LOAD_MODES

__all__ = ["split_parameters"]


def split_parameters(values: Mapping[str, Any], *, of: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part llama.cpp parameters into those of the model and those of the context, and check each value.

    Args:
        values: by llama.cpp's names (fields of ``llama_model_params`` and ``llama_context_params``).
        of: who takes them, for the error.

    Raises:
        UnknownParameterError: llama.cpp has no such parameter; the nearest is named.
        InvalidParameterError: a value does not fit its parameter.
    """
    model_names, context_names = native.model_param_names(), native.context_param_names()
    for name in values:
        if name not in model_names and name not in context_names:
            raise UnknownParameterError(name, (*model_names, *context_names), of=of)
    model = {name: value for name, value in values.items() if name in model_names}
    context = {name: value for name, value in values.items() if name in context_names}
    checked = dict(model)
    if checked.get("load_mode") in LOAD_MODES:
        del checked["load_mode"]  # Model.load's own
    native.model_params(checked)
    native.context_params(context)
    return model, context
