"""The command line: one file a command group.

Each module has a ``register(app)`` that adds its commands. Only the module of the command that was asked
for is imported, so that no command waits for what another one needs; ``llamaherd --help`` imports none.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence

import typer

from ..errors import ConfigError, LlamaherdError

__all__ = ["COMMANDS", "main", "make_app"]

COMMANDS = {
    "suggest": ("suggest", "Many ways to go on from a prompt or a Lean goal."),
    "run": ("run", "Stream one completion, or one chat turn."),
    "chat": ("chat", "Talk with a model in the terminal."),
    "info": ("info", "Versions, CPU features, threads and why."),
    "inspect": ("files", "What a model file holds, and every fault of it."),
    "convert": ("files", "Write a model file in another container or type."),
    "perplexity": ("measure", "How well a model predicts the text in a file."),
    "compare": ("measure", "What one model predicts otherwise than another."),
    "bench": ("bench", "What llamaherd-kernels gains on this machine."),
    "serve": ("serve", "Serve models over HTTP: OpenAI's endpoints, Lean's, and a page."),
    "plan": ("cluster", "Which machine would hold which layers, and how fast."),
    "cluster": ("cluster", "Several machines that run one model: start, join, status, stop."),
    "slice": ("making", "Layers [A, B) of a GGUF model as a model of their own."),
    "synthesize": (
        "making",
        "A tiny random but working model, to try things.",
    ),
    "export-torch": ("making", "A GGUF model as a transformers checkpoint."),
    "import-torch": ("making", "A transformers checkpoint as GGUF."),
}
"""Command -> its module here, and its line in ``llamaherd --help``."""

_MODULES = ("suggest", "run", "chat", "info", "files", "making", "measure", "bench", "serve", "cluster")
_INTERRUPTED = 130

# typer carries a click of its own in later versions
_ClickException: type[Exception] = next(
    c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException"
)


def _version(value: bool) -> None:
    if value:
        from llamaherd import __version__

        typer.echo(f"llamaherd {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """llama.cpp's engine under Python's tools."""


def make_app(arguments: Sequence[str]) -> typer.Typer:
    """The app with what these arguments need: one command's module, or a line of help for each command."""
    app = typer.Typer(
        name="llamaherd",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    app.callback()(_root)
    first = next((a for a in arguments if not a.startswith("-")), None)
    if first in COMMANDS:
        _register(app, COMMANDS[first][0])
    elif first is None:
        for name, (module, summary) in COMMANDS.items():
            if _exists(module):
                app.command(name, help=summary)(_placeholder)
    else:
        for module in filter(_exists, _MODULES):
            _register(app, module)
    return app


def _exists(module: str) -> bool:
    return importlib.util.find_spec(f"{__name__}.{module}") is not None


def _register(app: typer.Typer, module: str) -> None:
    importlib.import_module(f"{__name__}.{module}").register(app)


def _placeholder() -> None:
    """Stands for a command in ``llamaherd --help``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the process's exit code.

    An error that llamaherd raises on purpose is one line on standard error and exit code 1 (2 if an option
    is wrong); with ``LLAMAHERD_DEBUG=1`` its traceback as well. Ctrl-C (130) and a
    reader that left (1) are quiet.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = make_app(given)(given, standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    except BrokenPipeError:
        # nobody reads any more; Python's own flush at exit must not complain about it either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except typer.Exit as stop:
        return int(stop.exit_code)
    except LlamaherdError as error:
        if os.environ.get("LLAMAHERD_DEBUG") == "1":
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except _ClickException as usage:
        usage.show()  # type: ignore[attr-defined]
        return int(usage.exit_code)  # type: ignore[attr-defined]
