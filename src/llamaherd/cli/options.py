"""Options that several commands share, and what they make of them."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import LoraConfig, SamplingConfig
from ..demo import demo_model
from ..errors import ConfigError, FileError, InvalidParameterError, UnknownParameterError
from .interrupts import Interrupted, deferred_interrupt

if TYPE_CHECKING:
    from ..engine.model import Model
    from ..herd import Herd
    from ..shard.pipeline import Pipeline

__all__ = [
    "Cluster",
    "EngineOptions",
    "Lora",
    "MinP",
    "NCtx",
    "NGpuLayers",
    "Seed",
    "Set",
    "Stages",
    "Temperature",
    "Threads",
    "TopK",
    "TopP",
    "model_and_prompt",
    "model_path",
    "open_pipeline",
    "read_text",
]

NCtx = Annotated[int | None, typer.Option("--n-ctx", "-c", help="Tokens of context.")]
Threads = Annotated[int | None, typer.Option("--threads", "-t", help="Threads; see `llamaherd info`.")]
NGpuLayers = Annotated[
    int | None,
    typer.Option("--n-gpu-layers", help="Layers on a GPU, if llama.cpp has one."),
]
Lora = Annotated[
    list[str] | None,
    typer.Option("--lora", metavar="FILE[:SCALE]", help="Apply a LoRA adapter."),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "--param",
        metavar="NAME=VALUE",
        help="Any llama.cpp model or context parameter, or field of SamplingConfig, by its name.",
    ),
]
Stages = Annotated[
    int | None,
    typer.Option("--stages", help="Cut the model by layers into so many processes of this machine."),
]
Cluster = Annotated[
    str | None,
    typer.Option("--cluster", metavar="HOST[:PORT]", help="Cut it over the machines of this cluster."),
]
Temperature = Annotated[float | None, typer.Option("--temperature", help="0 is greedy.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Keep the k best; 0: all.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Keep this much probability.")]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", help="Keep this share of the best one's probability."),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="The same seed gives the same text."),
]


def model_path(name: str | None) -> Path:
    """The model's file: the demo model for None and "demo".

    Raises:
        ModelNotFoundError: the demo model is wanted, but its package is not installed.
    """
    return demo_model() if name in (None, "demo") else Path(str(name))


def model_and_prompt(first: str | None, second: str | None) -> tuple[str | None, str | None]:
    """``[MODEL] [PROMPT]``: a single argument is the model if it looks like one, else the prompt."""
    if first is None or second is not None:
        return first, second
    if first == "demo" or first.endswith((".gguf", ".bin")) or Path(first).is_file():
        return first, None
    return None, first


def read_text(given: str | None, file: Path | None, what: str) -> str | None:
    """A text that is given, or in a file, or comes from standard input (``-``)."""
    if given is not None and file is not None:
        raise ConfigError(f"give the {what} or --file, not both")
    if given == "-" or (file is not None and str(file) == "-"):
        return sys.stdin.read()
    if file is None:
        return given
    try:
        return file.read_text("utf-8")
    except OSError as error:
        raise FileError(file, f"cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise FileError(file, "is not UTF-8 text") from error


@dataclass
class EngineOptions:
    """What the shared options say; loads the model and makes the herd.

    Attributes:
        model: extra parameters of llama.cpp's model.
        context: of its context.
        sampling: fields of SamplingConfig.
    """

    path: Path
    model: dict[str, Any] = field(default_factory=dict)
    context: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    loras: list[LoraConfig] = field(default_factory=list)
    stages: int | None = None
    cluster: str | None = None

    @classmethod
    def of(
        cls,
        path: Path,
        *,
        n_ctx: int | None,
        threads: int | None,
        n_gpu_layers: int | None,
        lora: Sequence[str] | None,
        settings: Sequence[str] | None,
        stages: int | None = None,
        cluster: str | None = None,
        **sampling: Any,
    ) -> EngineOptions:
        """Sort the options by what they are for. The flags win over --set.

        Raises:
            UnknownParameterError, InvalidParameterError: a name is nobody's; a --set is no NAME=VALUE.
        """
        options = cls(path, loras=[_lora(text) for text in lora or ()], stages=stages, cluster=cluster)
        if stages is not None and cluster is not None:
            raise InvalidParameterError("--stages", stages, "without --cluster, which has its machines")
        if options.is_cut and options.loras:
            raise InvalidParameterError("--lora", lora, "given without --stages: adapters are not cut")
        options._set(settings or ())
        flags = {"n_ctx": n_ctx, "n_threads": threads, "n_threads_batch": threads}
        options.context.update({k: v for k, v in flags.items() if v is not None})
        if n_gpu_layers is not None:
            options.model["n_gpu_layers"] = n_gpu_layers
        options.sampling.update({k: v for k, v in sampling.items() if v is not None})
        return options

    @property
    def is_cut(self) -> bool:
        """Whether the model is to run as a pipeline."""
        return self.stages is not None or self.cluster is not None

    def _set(self, settings: Sequence[str]) -> None:
        if not settings:
            return
        from ..native.params import context_param_names, model_param_names  # loads libllama

        places = dict.fromkeys(model_param_names(), self.model)
        places |= dict.fromkeys(context_param_names(), self.context)
        places |= {f.name: self.sampling for f in dataclasses.fields(SamplingConfig)}
        for text in settings:
            name, equals, value = text.partition("=")
            name = name.strip().replace("-", "_")
            if not equals:
                raise InvalidParameterError("--set", text, "NAME=VALUE")
            if name not in places:
                raise UnknownParameterError(name, places, of="llama.cpp")
            places[name][name] = _value(value)

    @contextmanager
    def herd(self, *, max_sequences: int = 1, n_ctx: int | None = None) -> Iterator[tuple[Model, Herd]]:
        """The loaded model and a herd on it, closed at the end."""
        import llamaherd

        context = ({"n_ctx": n_ctx} if n_ctx is not None else {}) | self.context
        with ExitStack() as stack:
            if self.is_cut:
                from ..config import SchedulerConfig

                context.setdefault("n_seq_max", SchedulerConfig(max_sequences=max_sequences).n_seq_max)
                # slices are cut and loaded in other processes: Ctrl-C need not wait for them
                engine = open_pipeline(self.path, self.stages, self.cluster, self.model, context)
                herd = stack.enter_context(llamaherd.Herd(engine, max_sequences=max_sequences))
                yield engine.model, herd
                return
            with deferred_interrupt() as interrupted, _progress(interrupted) as progress:
                load = llamaherd.Model.load
                model = stack.enter_context(
                    load(self.path, progress=progress, loras=self.loras, **self.model)
                )
                herd = llamaherd.Herd(model, max_sequences=max_sequences, **context)
                stack.enter_context(herd)
            yield model, herd


def open_pipeline(
    path: Path,
    stages: int | None,
    cluster: str | None,
    model: Mapping[str, Any],
    context: Mapping[str, Any],
) -> Pipeline:
    """The model over local stages or over a cluster, whichever is asked for."""
    from ..shard.opening import open_cluster, open_stages

    if cluster is not None:
        return open_cluster(path, cluster, model_params=model, **context)
    assert stages is not None
    return open_stages(path, stages, model_params=model, **context)


def _value(text: str) -> Any:
    """A value as JSON writes it; anything else is a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _lora(text: str) -> LoraConfig:
    path, colon, scale = text.rpartition(":")
    if not colon or Path(text).exists():
        return LoraConfig(text)
    try:
        return LoraConfig(path, float(scale))
    except ValueError:
        return LoraConfig(text)


@contextmanager
def _progress(interrupted: Interrupted) -> Iterator[Callable[[float], bool]]:
    """Counts the percents of a long load where somebody is watching; the load stops when interrupted."""
    watched = sys.stderr.isatty()
    shown = 0

    def show(share: float) -> bool:
        nonlocal shown
        percent = int(share * 100)
        if watched and shown + 5 <= percent < 100:
            shown = percent
            print(f"\rloading {percent} %", end="", file=sys.stderr, flush=True)
        return not interrupted.yes

    try:
        yield show
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
