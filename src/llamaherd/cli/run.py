"""``llamaherd run``: one completion or one chat turn, streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..config import SamplingConfig
from ..errors import ConfigError
from ..types import Failed, Finished, GenerationRequest, Prompt, Token
from . import options as o
from .terminal import note, rates, write

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add this module's command to ``app``."""
    app.command("run")(run_command)


def run_command(
    first: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A GGUF file; the demo model by default.")
    ] = None,
    second: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="What to continue; - reads standard input.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="A chat turn, by the model's template.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="With --chat: the system's message.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens.")] = 512,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="A text that ends the completion.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No line of timings at the end.")] = False,
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
    """Stream one completion of a prompt, or one chat turn with --chat.

    Ctrl-C stops it at once. The text goes to standard output, everything else to standard error.
    """
    if system is not None and not chat:
        raise ConfigError("--system is part of a chat; add --chat")
    model_name, text = (first, second) if file is not None else o.model_and_prompt(first, second)
    text = o.read_text(text, file, "prompt")
    if text is None:
        raise ConfigError("nothing to continue: give a PROMPT or --file FILE")
    options = o.EngineOptions.of(
        o.model_path(model_name), n_ctx=n_ctx, threads=threads, n_gpu_layers=n_gpu_layers, lora=lora,
        settings=settings, stages=stages, cluster=cluster,
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
    )  # fmt: skip
    sampling = SamplingConfig(**options.sampling)
    with options.herd() as (model, herd):
        prompt: Prompt = text
        if chat:
            from ..chat import ChatTemplate

            messages = [{"role": "system", "content": system}] if system is not None else []
            prompt = ChatTemplate.of(model).render([*messages, {"role": "user", "content": text}])
        request = GenerationRequest(prompt, max_tokens=max_tokens, sampling=sampling, stop=stop or ())
        ended_line = True
        try:
            for event in herd.stream(request):
                if isinstance(event, Token):
                    write(event.text)
                    ended_line = event.text.endswith("\n") if event.text else ended_line
                elif isinstance(event, Failed):
                    raise event.error
                elif isinstance(event, Finished) and not quiet:
                    _end_line(ended_line)
                    ended_line = True
                    note(rates(event.usage, event.timings))
        finally:
            _end_line(ended_line)


def _end_line(ended: bool) -> None:
    if not ended:
        write("\n")
