"""``llamaherd suggest``: many distinct ways to go on."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError, LlamaherdError
from ..suggestions import DEFAULT_SAMPLING, suggest
from ..types import Finished, GenerationRequest, Prompt, Suggestion, Timings, Usage
from . import options as o
from .terminal import note, printable, rates

if TYPE_CHECKING:
    from ..engine.model import Model
    from ..herd import Herd
    from ..lean import LeanPreset

__all__ = ["register"]

_SLOTS = 16


def register(app: typer.Typer) -> None:
    """Add this module's command to ``app``."""
    app.command("suggest")(suggest_command)


@dataclass
class _Question:
    """What is asked for: a prompt, or a Lean goal and how it must go on."""

    prompt: str | None
    goal: str | None
    prefix: str
    context: str
    preset: LeanPreset
    stop: list[str]

    def prepare(self, model: Model) -> tuple[Prompt, dict[str, Any], str | None]:
        """The prompt, further arguments of suggest(), and a grammar."""
        if self.goal is None:
            assert self.prompt is not None
            return self.prompt + self.prefix, {"stop": self.stop}, None
        from ..chat import ChatTemplate

        preset, prefix = self.preset, self.prefix
        chat = ChatTemplate.of(model) if preset.needs_chat else None
        prompt = preset.prompt(self.goal, prefix, self.context, chat=chat)
        more = {"stop": [*preset.stop, *self.stop], "keep": lambda text: preset.keep(text, prefix)}
        return prompt, more, preset.grammar_for(prefix)

    def shown(self, text: str) -> str:
        """A suggestion as the user sees it."""
        return self.prefix + text if self.goal is None else self.preset.shown(text, self.prefix)


@dataclass
class _Meter:
    """Runs requests on a herd and adds up their tokens and seconds."""

    herd: Herd
    finished: list[Finished] = field(default_factory=list)

    def generate(self, request: GenerationRequest) -> Finished:
        final = self.herd.generate(request)
        self.finished.append(final)
        return final

    @property
    def usage(self) -> Usage:
        """Later waves find their prompt in the cache: it counts once."""
        first = self.finished[0].usage
        produced = sum(f.usage.completion_tokens for f in self.finished)
        return Usage(first.prompt_tokens, produced, first.cached_tokens)

    @property
    def timings(self) -> Timings:
        """Summed over the waves."""
        all_timings = [f.timings for f in self.finished]
        names = [f.name for f in dataclasses.fields(Timings)]
        return Timings(**{name: sum(getattr(t, name) for t in all_timings) for name in names})


def suggest_command(
    first: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A GGUF file; the demo model by default.")
    ] = None,
    second: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="What to continue; - reads standard input.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")] = None,
    n: Annotated[int, typer.Option("--n", "-n", help="How many suggestions.")] = 8,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens of each.")] = 64,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="A text that ends a suggestion.")] = None,
    beam: Annotated[bool, typer.Option("--beam", help="Exact beam search instead of sampling.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    lean: Annotated[
        str | None,
        typer.Option("--lean", metavar="GOAL", help="Suggest tactics for this Lean 4 goal; - reads."),
    ] = None,
    prefix: Annotated[str, typer.Option("--prefix", help="What every suggestion begins with.")] = "",
    context: Annotated[
        Path | None, typer.Option("--context", help="With --lean: the file up to the tactic.")
    ] = None,
    preset: Annotated[
        str, typer.Option("--preset", help="With --lean: llmstep, reprover, few-shot, chat or tactics.")
    ] = "tactics",
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    min_p: o.MinP = None,
    seed: o.Seed = None,
    n_ctx: o.NCtx = None,
    threads: o.Threads = None,
    n_gpu_layers: o.NGpuLayers = None,
    lora: o.Lora = None,
    settings: o.Set = None,
    stages: o.Stages = None,
    cluster: o.Cluster = None,
) -> None:
    """Many distinct ways to go on from a prompt or a Lean goal, best first.

    Ranked by log-probability per token, which each one is shown with. One prefill, then all are decoded
    together. Sampling draws from the whole distribution at temperature 0.7 unless told otherwise.
    """
    question, model_name = _question(first, second, file, lean, prefix, context, preset, stop)
    options = o.EngineOptions.of(
        o.model_path(model_name), n_ctx=n_ctx, threads=threads, n_gpu_layers=n_gpu_layers, lora=lora,
        settings=settings, stages=stages, cluster=cluster,
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
    )  # fmt: skip
    sampling = DEFAULT_SAMPLING.replace(**options.sampling)
    with options.herd(max_sequences=max(1, min(max(n, 1), _SLOTS))) as (model, herd):
        prompt, more, grammar = question.prepare(model)
        if grammar is not None and sampling.grammar is None and not beam:
            sampling = sampling.replace(grammar=grammar)
        meter = _Meter(herd)
        found = suggest(meter.generate, prompt, n, max_tokens, sampling=sampling, beam=beam, **more)
        if as_json:
            _print_json(options.path, question, found, meter)
        else:
            _print_table(question, found)
            note(rates(meter.usage, meter.timings))
    if not found:
        raise LlamaherdError(
            "the model has nothing to suggest here; try another prompt or a higher temperature"
        )
    if len(found) < n and not as_json:
        note(f"only {len(found)} of {n} came out distinct; a higher --temperature gives more")


def _question(
    first: str | None,
    second: str | None,
    file: Path | None,
    lean: str | None,
    prefix: str,
    context: Path | None,
    preset: str,
    stop: list[str] | None,
) -> tuple[_Question, str | None]:
    """What is asked for, and of which model."""
    from ..lean import lean_preset

    if lean is not None:
        if second is not None or file is not None:
            raise ConfigError("--lean GOAL takes the place of the prompt; give one of them")
        text = o.read_text(None, context, "context") or ""
        question = _Question(
            None, o.read_text(lean, None, "goal"), prefix, text, lean_preset(preset), stop or []
        )
        return question, first
    model_name, prompt = (first, second) if file is not None else o.model_and_prompt(first, second)
    prompt = o.read_text(prompt, file, "prompt")
    if prompt is None:
        raise ConfigError("nothing to continue: give a PROMPT, --file FILE or --lean GOAL")
    return _Question(prompt, None, prefix, "", lean_preset(preset), stop or []), model_name


def _print_table(question: _Question, found: list[Suggestion]) -> None:
    for rank, suggestion in enumerate(found, 1):
        first, *rest = printable(question.shown(suggestion.text)).split("\n")
        print(f"{rank:>3}  {suggestion.score:>7.3f}  {first}")
        for line in rest:
            print(f"{'':>14}{line}")
    sys.stdout.flush()


def _print_json(path: Path, question: _Question, found: list[Suggestion], meter: _Meter) -> None:
    suggestions = [dataclasses.asdict(s) | {"text": question.shown(s.text)} for s in found]
    answer = {
        "model": str(path),
        "suggestions": suggestions,
        "usage": dataclasses.asdict(meter.usage),
        "seconds": dataclasses.asdict(meter.timings) | {"total": meter.timings.total},
    }
    print(json.dumps(answer, ensure_ascii=False, indent=2))
