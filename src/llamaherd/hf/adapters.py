"""LoRA adapters under transformers' names: load_adapter, set_adapter, disable_adapters, ..."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, NoReturn

from ..config import LoraConfig
from ..errors import InvalidParameterError, RequestError, UnknownParameterError, UnsupportedError
from .runtime import Runtime

__all__ = ["AdapterMixin"]


@dataclass
class _Adapter:
    path: str
    scale: float
    active: bool = True


class AdapterMixin:
    """Loads GGUF adapters, several at once, each with a scale; switching costs no reload.

    A cache holds keys and values as the adapters were when it was filled: start a new one after a switch.
    """

    runtime: Runtime
    _adapters: dict[str, _Adapter]
    _adapters_on: bool

    def load_adapter(
        self,
        peft_model_id: str | PathLike[str],
        adapter_name: str | None = None,
        *,
        scale: float = 1.0,
        **kwargs: Any,
    ) -> None:
        """Load a GGUF LoRA adapter and switch it on, beside those that are on.

        Args:
            peft_model_id: the adapter's file (``general.type = adapter``; llama.cpp's
                ``convert_lora_to_gguf.py`` makes one of a peft adapter).
            adapter_name: default ``"default"``.
            scale: multiplies the adapter's own alpha / r.

        Raises:
            ModelNotFoundError, FileError, ModelLoadError: the adapter is missing or not for this model.
            RequestError: an adapter of that name is loaded.
        """
        name = adapter_name or "default"
        if kwargs:
            raise UnknownParameterError(next(iter(kwargs)), ("adapter_name", "scale"), of="load_adapter")
        if name in self._adapters:
            raise RequestError(
                f"an adapter {name!r} is loaded; delete_adapter({name!r}) or choose another name"
            )
        lora = LoraConfig(str(peft_model_id), scale)
        with self.runtime.lock:
            self.runtime.model.add_lora(lora)
            self._adapters[name] = _Adapter(lora.path, lora.scale)
            self._apply()

    def set_adapter(self, adapter_name: str | Sequence[str]) -> None:
        """Switch on exactly these adapters. Raises InvalidParameterError for one that is not loaded."""
        names = [adapter_name] if isinstance(adapter_name, str) else list(adapter_name)
        for name in names:
            self._adapter(name)
        for name, adapter in self._adapters.items():
            adapter.active = name in names
        self._adapters_on = True
        self._apply()

    def scale_adapter(self, scale: float | Mapping[str, float], adapter_name: str | None = None) -> None:
        """Change the scale of one adapter (of the only one, if no name is given), or of several by name."""
        if not isinstance(scale, Mapping):
            names = [adapter_name] if adapter_name else list(self._adapters)
            if len(names) != 1:
                raise InvalidParameterError(
                    "adapter_name", adapter_name, f"one of {', '.join(names) or 'none'}"
                )
            scale = {names[0]: scale}
        checked = {name: LoraConfig(self._adapter(name).path, value).scale for name, value in scale.items()}
        for name, value in checked.items():
            self._adapters[name].scale = value
        self._apply()

    def disable_adapters(self) -> None:
        """Switch all adapters off until enable_adapters()."""
        self._adapters_on = False
        self._apply()

    def enable_adapters(self) -> None:
        """Switch the active adapters on again."""
        self._adapters_on = True
        self._apply()

    def active_adapters(self) -> list[str]:
        """Names of the adapters that are on."""
        return [name for name, a in self._adapters.items() if a.active] if self._adapters_on else []

    def delete_adapter(self, adapter_names: str | Sequence[str]) -> None:
        """Switch adapters off and free them. Raises InvalidParameterError for one that is not loaded."""
        for name in [adapter_names] if isinstance(adapter_names, str) else list(adapter_names):
            adapter = self._adapter(name)
            index = list(self._adapters).index(name)
            adapter.active = False
            with self.runtime.lock:
                self._apply()
                self.runtime.model.remove_lora(index)
                del self._adapters[name]
                self._apply()

    def add_adapter(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: a new adapter would have to be trained."""
        raise UnsupportedError(
            "llama.cpp does not train; load a trained adapter with load_adapter('adapter.gguf')"
        )

    def get_adapter_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the weights are llama.cpp's."""
        raise UnsupportedError(
            "the adapter's weights are in llama.cpp; read its file with llamaherd.files.open"
        )

    def _adapter(self, name: str) -> _Adapter:
        if name not in self._adapters:
            raise InvalidParameterError(
                "adapter_name", name, f"one that is loaded ({', '.join(self._adapters) or 'none'})"
            )
        return self._adapters[name]

    def _apply(self) -> None:
        on = self._adapters_on
        self.runtime.scale_loras([a.scale if on and a.active else 0.0 for a in self._adapters.values()])
