"""A model: weights, vocabulary, metadata and adapters. Contexts are made from it."""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from ..config import LoraConfig
from ..errors import (
    ClosedError,
    DuplicateTokenError,
    InvalidParameterError,
    ModelLoadError,
    ModelNotFoundError,
    UnsupportedFileError,
)
from ..files import Assumptions, contents_of, convert, find_duplicate_token
from ..files import open as open_file
from ..files.metadata import Value
from ..native import model as native
from ..native.handles import Handle
from ..native.library import forget_log, recent_log
from . import legacy
from .guidance import Guide
from .vocabulary import Vocabulary

__all__ = ["Model"]

Progress = Callable[[float], bool | None]

LOAD_MODES = ("fast-open", "fast-run")
"""Ways to load beside llama.cpp's own."""


class Dependent(Protocol):
    """What stands on a model: it must let go of what the model frees."""

    def close(self) -> None:
        """Free it; idempotent."""

    def drop_lora(self, index: int) -> None:
        """Stop using the adapter at ``index``, which is about to be freed."""


_load_lock = threading.Lock()  # llama.cpp's log belongs to one load at a time


class Model:
    """A loaded model; close() or ``with`` frees it, and closes the contexts made from it.

    Make one with :meth:`load`.
    """

    def __init__(self, handle: Handle, path: str, params: Mapping[str, Any]) -> None:
        self._handle = handle
        self._adapters: list[tuple[Handle, LoraConfig]] = []
        self._contexts: weakref.WeakSet[Dependent] = weakref.WeakSet()
        self.path = path
        self.params = dict(params)
        self._facts = native.model_facts(handle)
        self.vocabulary = Vocabulary(handle)
        self.guide = Guide(self.vocabulary)

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        *,
        progress: Progress | None = None,
        loras: Sequence[LoraConfig] = (),
        load_mode: str | None = None,
        architecture: str | None = None,
        assume: Assumptions | None = None,
        **params: Any,
    ) -> Model:
        """Load a model file of any container, by mmap.

        The file is checked before llama.cpp sees it: what would make libllama abort the process is
        refused with the reason. Files from before GGUF (GGML, GGMF, GGJT, also in parts) are run as they
        are; no file is written.

        Args:
            path: the file, or the first of a split one.
            progress: called with 0..1 while loading; returning False stops it.
            loras: adapters to apply, with their scales.
            load_mode: ``"fast-open"`` leaves the weights where they lie in the file and repacks nothing for
                the CPU: opening takes milliseconds. ``"fast-run"`` lets llama.cpp repack what its kernels
                like better: opening takes longer, and a file from before GGUF is held in memory. The
                default is fast-run for GGUF, and for older files where some block type has such kernels.
                Also llama.cpp's own names (``"mmap"``, ``"none"``, ``"mlock"``, ...).
            architecture: of a file from before GGUF, where its tensors' names do not tell.
            assume: what files from before GGUF do not say (context length, epsilon, rope base).
            params: llama.cpp's own model parameters by their names (``n_gpu_layers``, ``split_mode``,
                ``main_gpu``, ``tensor_split``, ``kv_overrides``, ``use_extra_bufts``, ...).

        Raises:
            ModelNotFoundError, FileError: the file is missing, truncated, malformed or no model.
            UnknownParameterError, InvalidParameterError: a parameter is.
            ModelLoadError: llama.cpp refused it (its log is in the message), or progress stopped it.
        """
        text = str(path)
        if not Path(text).is_file():
            raise ModelNotFoundError(text)
        stopped = False
        failure: BaseException | None = None

        def on_progress(share: float) -> bool:
            nonlocal stopped, failure
            try:
                stopped = progress is not None and progress(share) is False
            except BaseException as error:  # it must not travel through C
                failure, stopped = error, True
            return not stopped

        for lora in loras:
            if not isinstance(lora, LoraConfig):
                raise InvalidParameterError("loras", lora, "LoraConfig(path, scale) each")
        if load_mode is not None and load_mode not in LOAD_MODES:
            params["load_mode"] = load_mode
        notify = on_progress if progress is not None else None
        with _load_lock:
            forget_log()
            handle = _load(text, load_mode, architecture, assume, params, notify)
            log = recent_log()
        if failure is not None:
            if handle is not None:
                handle.close()
            raise failure
        if handle is None:
            if stopped:
                raise ModelLoadError(text, "loading was stopped by the progress callback")
            raise ModelLoadError(text, "llama.cpp cannot load it", log)
        model = cls(handle, text, params)
        try:
            for lora in loras:
                model.add_lora(lora)
        except BaseException:
            model.close()
            raise
        return model

    # -------------------------------------------------------------------------------- facts

    @cached_property
    def metadata(self) -> dict[str, str]:
        """All scalar metadata as llama.cpp prints it."""
        return native.model_metadata(self._handle)

    @property
    def architecture(self) -> str:
        """``general.architecture``, e.g. ``"llama"``."""
        return self.metadata.get("general.architecture", "")

    @property
    def description(self) -> str:
        """llama.cpp's one-line description."""
        return str(self._facts["description"])

    @property
    def n_params(self) -> int:
        """Number of weights."""
        return int(self._facts["n_params"]) or self._sizes["n_params"]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return int(self._facts["size"]) or self._sizes["size"]

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return _sizes(self.path)  # llama.cpp counts only what it loads itself

    @property
    def n_ctx_train(self) -> int:
        """Context length it was trained for, in tokens."""
        return int(self._facts["n_ctx_train"])

    @property
    def n_embd(self) -> int:
        """Width of the hidden states."""
        return int(self._facts["n_embd"])

    @property
    def n_layer(self) -> int:
        """Number of layers."""
        return int(self._facts["n_layer"])

    @property
    def n_swa(self) -> int:
        """Tokens that layers with a sliding window see; 0 without such layers."""
        return int(self._facts["n_swa"])

    @property
    def n_head(self) -> int:
        """Query heads of a layer."""
        return int(self._facts["n_head"])

    @property
    def n_head_kv(self) -> int:
        """Key and value heads of a layer."""
        return int(self._facts["n_head_kv"])

    @property
    def n_embd_out(self) -> int:
        """Width of the embeddings it puts out."""
        return int(self._facts["n_embd_out"])

    @property
    def is_recurrent(self) -> bool:
        """Whether (part of) its memory is a recurrent state, which cannot be cut."""
        return bool(self._facts["is_recurrent"] or self._facts["is_hybrid"])

    @property
    def has_encoder(self) -> bool:
        """Whether it has an encoder."""
        return bool(self._facts["has_encoder"])

    @property
    def has_decoder(self) -> bool:
        """Whether it has a decoder."""
        return bool(self._facts["has_decoder"])

    def chat_template(self, name: str | None = None) -> str | None:
        """The Jinja chat template that the file carries (or the one of that name), if any."""
        return native.chat_template(self.handle, name)

    def save(self, path: str | PathLike[str], format: str = "gguf", **options: Any) -> None:
        """Write the model's file in another container (files.convert: gguf, ggjt, ggjt1, ggmf, ggml, ...).

        Raises UnsupportedFileError naming what that container cannot hold.
        """
        with open_file(self.path) as file:
            convert(file, path, to=format, **options)

    # ----------------------------------------------------------------------------- adapters

    def add_lora(self, lora: LoraConfig) -> None:
        """Load a LoRA adapter; contexts made from now on apply it.

        Raises:
            ModelNotFoundError, FileError, ModelLoadError: the adapter is missing or not for this model.
        """
        if not Path(lora.path).is_file():
            raise ModelNotFoundError(lora.path, "check the adapter's path")
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open_file(lora.path))
            path = lora.path
            if file.container == "ggla":
                path = stack.enter_context(legacy.in_memory_adapter(file))
            stack.enter_context(_load_lock)
            forget_log()
            handle = native.load_adapter(self.handle, path)
            log = recent_log()
        if handle is None:
            raise ModelLoadError(lora.path, f"not an adapter for {self.path}", log)
        self._adapters.append((handle, lora))

    def remove_lora(self, index: int) -> None:
        """Free the adapter at ``index``, in every context that applies it too.

        Raises:
            InvalidParameterError: there is no adapter at that index.
        """
        if not 0 <= index < len(self._adapters):
            raise InvalidParameterError("index", index, f"one of the model's {len(self._adapters)} adapters")
        for context in list(self._contexts):
            context.drop_lora(index)
        handle, _ = self._adapters.pop(index)
        handle.close()

    @property
    def loras(self) -> tuple[LoraConfig, ...]:
        """The adapters and their scales."""
        return tuple(config for _, config in self._adapters)

    @property
    def adapters(self) -> list[tuple[Handle, float]]:
        """Handles and scales, for contexts."""
        return [(handle, config.scale) for handle, config in self._adapters]

    # ----------------------------------------------------------------------------- lifetime

    def owns(self, context: Dependent) -> None:
        """Note a context, which must not outlive the model."""
        self._contexts.add(context)

    @property
    def handle(self) -> Handle:
        """The owned pointer, for the engine's other modules. Raises ClosedError."""
        if self._handle.closed:
            raise ClosedError("model")
        return self._handle

    def close(self) -> None:
        """Free the model, its adapters and the contexts made from it; idempotent."""
        for context in list(self._contexts):
            context.close()
        for adapter, _ in self._adapters:
            adapter.close()
        self._adapters.clear()
        self._handle.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._handle.closed else self.description
        return f"<Model {self.path!r}: {state}>"


# block types for which llama.cpp's CPU backend has kernels over repacked weights
# (ggml_repack_get_optimal_repack_type)
_REPACKED = frozenset({"q4_0", "q8_0", "iq4_nl", "mxfp4", "q2_k", "q4_k", "q5_k", "q6_k"})


def _load(
    path: str,
    load_mode: str | None,
    architecture: str | None,
    assume: Assumptions | None,
    params: dict[str, Any],
    progress: native.Progress | None,
) -> Handle | None:
    """The way that this file and mode take."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_file(path, architecture=architecture))
        if file.container == "gguf":
            _check_vocabulary(path, file.metadata)
            _check_sizes(path, file.metadata, params.get("kv_overrides"))
            if load_mode == "fast-open":
                params = {"use_extra_bufts": False, **params}
            return native.load_model(path, params, progress)
        contents = contents_of(file, assume=assume)
        _check_vocabulary(path, contents.values())
        kinds = {str(t.type).lower() for t in file.tensors.values()}
        if load_mode == "fast-open" or (load_mode != "fast-run" and not kinds & _REPACKED):
            handle = legacy.load_in_place(contents, params)
            stack.pop_all()  # the weights are in the mapping, which lives as long as the model
            return handle
        return legacy.load_repacked(contents, params, progress)


def _check_sizes(path: str, metadata: Mapping[str, Value], overrides: Any) -> None:
    """Refuse numbers of layers and experts on which libllama would abort the process."""
    changed = overrides if isinstance(overrides, Mapping) else {}
    found = {**metadata, **changed}
    prefix = found.get("general.architecture")
    experts = found.get(f"{prefix}.expert_count")
    limits = [("block_count", 1, 512)]  # LLAMA_MAX_LAYERS
    if isinstance(experts, int) and experts:
        limits += [("expert_count", 1, 512), ("expert_used_count", 1, experts)]  # LLAMA_MAX_EXPERTS
    for name, low, high in limits:
        key = f"{prefix}.{name}"
        value = found.get(key, 0 if name == "expert_used_count" else None)
        if isinstance(value, int) and not low <= value <= high:
            if key in changed or f"{prefix}.expert_count" in changed:
                raise InvalidParameterError(f"kv_overrides[{key!r}]", value, f"in [{low}, {high}]")
            raise UnsupportedFileError(path, f"{key} is {value}; llama.cpp takes [{low}, {high}]")


def _sizes(path: str) -> dict[str, int]:
    with open_file(path) as file:
        tensors = list(file.tensors.values())
        return {
            "n_params": sum(math.prod(t.shape) for t in tensors),
            "size": sum(t.nbytes for t in tensors),
        }


def _check_vocabulary(path: str, metadata: Mapping[str, Value]) -> None:
    """Refuse what would make libllama abort the process."""
    duplicate = find_duplicate_token(metadata)
    if duplicate is not None:
        first, second, token = duplicate
        shown = token if isinstance(token, str) else token.decode("utf-8", "replace")
        raise DuplicateTokenError(path, shown, first, second)
