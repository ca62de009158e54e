"""``llamaherd chat``: a conversation in the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import SamplingConfig
from ..errors import LlamaherdError, PromptTooLongError
from ..types import Failed, Finished, GenerationRequest, Token
from . import options as o
from .terminal import note, printable, rates, write

if TYPE_CHECKING:
    from ..chat import ChatTemplate
    from ..herd import Herd

__all__ = ["register"]

_HELP = """\
Enter sends, Alt-Enter (or Esc, Enter) begins a new line, the arrows recall what you sent before.
Ctrl-C stops an answer; Ctrl-D, or Ctrl-C at an empty line, leaves.
/reset      forget the conversation      /retry      ask for another answer
/undo       forget the last turn         /system X   set the system's message to X, and reset
/help       this                         /quit       leave"""


def register(app: typer.Typer) -> None:
    """Add this module's command to ``app``."""
    app.command("chat")(chat_command)


@dataclass
class _Conversation:
    """The messages so far, and how to get the next one."""

    herd: Herd
    template: ChatTemplate
    sampling: SamplingConfig
    max_tokens: int
    system: str | None
    turns: list[dict[str, str]] = field(default_factory=list)

    def answer(self) -> None:
        """Stream the assistant's next message; Ctrl-C ends it where it is, and it stays as it is."""
        while True:
            try:
                handle = self.herd.submit(self._request())
                break
            except PromptTooLongError:
                if len(self.turns) < 3:
                    raise
                del self.turns[:2]
                note("(the context is full: the oldest turn is forgotten)")
        text = ""
        final: Finished | None = None
        while final is None:
            try:
                for event in handle:
                    if isinstance(event, Token):
                        text += event.text
                        write(event.text)
                    elif isinstance(event, Failed):
                        raise event.error
                    else:
                        final = event
            except KeyboardInterrupt:
                handle.cancel()
                if not sys.stdin.isatty():
                    raise  # a script: nobody is there to go on
        write("" if text.endswith("\n") else "\n")
        self.turns.append({"role": "assistant", "content": text})
        reason = {"length": "; cut at --max-tokens or the context's end", "cancelled": "; stopped"}
        note(f"({rates(final.usage, final.timings)}{reason.get(final.completions[0].finish_reason, '')})")

    def _request(self) -> GenerationRequest:
        system = [{"role": "system", "content": self.system}] if self.system else []
        prompt = self.template.render([*system, *self.turns])
        return GenerationRequest(prompt, max_tokens=self.max_tokens, sampling=self.sampling)

    def say(self, text: str) -> None:
        """One turn. If it cannot be answered, the conversation is as before."""
        self.turns.append({"role": "user", "content": text})
        try:
            self.answer()
        except LlamaherdError as error:
            if self.turns and self.turns[-1]["role"] == "user":
                del self.turns[-1]
            note(f"error: {error}")

    def command(self, line: str) -> bool:
        """Obey a line that begins with a slash; False to leave."""
        name, _, rest = line.partition(" ")
        if name in ("/quit", "/exit"):
            return False
        if name == "/reset":
            self.turns.clear()
        elif name == "/undo":
            del self.turns[-2:]
        elif name == "/system":
            self.system = rest.strip() or None
            self.turns.clear()
        elif name == "/retry" and self.turns:
            question = self.turns[-2]["content"]
            del self.turns[-2:]
            self.say(question)
        else:
            note(_HELP)
        return True


def chat_command(
    model_name: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A GGUF file; the demo model by default.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="The system's message.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens of an answer.")] = 1024,
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
    """Talk with a model in the terminal.

    Your lines are remembered between sessions. Where standard input is no terminal, each of its lines is
    a turn. /help says what else there is.
    """
    options = o.EngineOptions.of(
        o.model_path(model_name), n_ctx=n_ctx, threads=threads, n_gpu_layers=n_gpu_layers, lora=lora,
        settings=settings, stages=stages, cluster=cluster,
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
    )  # fmt: skip
    sampling = SamplingConfig(**options.sampling)
    from ..chat import ChatTemplate

    with options.herd() as (model, herd):
        template = ChatTemplate.of(model)
        conversation = _Conversation(herd, template, sampling, max_tokens, system)
        if sys.stdin.isatty():
            note(f"{printable(model.description)}; /help says what you can do here")
        for line in _lines():
            if line.startswith("/"):
                if not conversation.command(line):
                    break
            elif line.strip():
                conversation.say(line)


def _lines() -> Iterator[str]:
    """What the user sends, until they leave."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    ask = _prompter()
    while True:
        try:
            line = ask()
        except (EOFError, KeyboardInterrupt):
            return
        yield line


def _prompter() -> Callable[[], str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _clear(event: Any) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    path = _history_path()
    history = FileHistory(str(path)) if path is not None else InMemoryHistory()
    session: PromptSession[str] = PromptSession(
        history=history, multiline=True, key_bindings=keys, prompt_continuation="  ", reserve_space_for_menu=0
    )

    return lambda: session.prompt("> ")


def _history_path() -> Path | None:
    """Where the lines are remembered (XDG's state folder); None if it cannot be written."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    folder = Path(state) / "llamaherd"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "chat_history"
        path.touch(mode=0o600)
    except OSError:
        return None
    return path
