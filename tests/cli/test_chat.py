from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Run
from tests.cli.terminal_process import TerminalProcess

ANSWER = "tokens/s"
READY = "\x1b[?2004h"  # bracketed paste on: the prompt takes input
ANSWERING = "\x1b[?2004l"


def test_each_line_of_a_pipe_is_a_turn(llamaherd: Run, tiny_model_path: Path) -> None:
    done = llamaherd(
        "chat", tiny_model_path, "--max-tokens", 8, "--n-ctx", 512, "--temperature", 0,
        input="hello\n\nand you?\n/retry\n/quit\nnever read\n",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("(prefill") == 3
    assert "more cached" in done.stderr  # the second turn goes on from the first one's KV cache


def test_commands(llamaherd: Run, tiny_model_path: Path) -> None:
    lines = [
        "/help",
        "/retry",
        "/undo",
        "hello",
        "/undo",
        "hello",
        "/system Be brief.",
        "hello",
        "/reset",
        "hello",
    ]
    done = llamaherd(
        "chat", tiny_model_path, "--max-tokens", 6, "--temperature", 0, "--n-ctx", 512,
        input="\n".join(lines) + "\n",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Alt-Enter" in done.stderr
    assert done.stderr.count("(prefill") == 4


def test_a_full_context_forgets_the_oldest_turn(llamaherd: Run, tiny_model_path: Path) -> None:
    done = llamaherd(
        "chat", tiny_model_path, "--max-tokens", 60, "--n-ctx", 256, "--seed", 1,
        input="tell me something long please\n" * 6,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "the oldest turn is forgotten" in done.stderr
    assert done.stderr.count("(prefill") == 6


def test_a_model_without_a_template_says_so(llamaherd: Run, tmp_path: Path) -> None:
    from llamaherd.files.synthesize import synthesize

    path = synthesize(tmp_path / "plain.gguf", "llama", chat_template=None)
    done = llamaherd("chat", path, input="hello\n")
    assert done.returncode == 1
    assert "no chat template" in done.stderr


@pytest.mark.real
def test_a_conversation_in_a_terminal(demo_model_path: Path, environment: dict[str, str]) -> None:
    terminal = TerminalProcess(["chat", "demo", "--max-tokens", 2000, "--temperature", 0], environment)
    try:
        terminal.wait_for("/help says")
        terminal.wait_for(READY)
        terminal.type("My name is Zoe.\x1b\rWhat is my name?\r")  # Alt-Enter: two lines, one turn
        terminal.wait_for("Zoe", 120)
        terminal.wait_for(ANSWER)
        terminal.wait_for(READY)
        terminal.type("Write a very long story about the sea.\r")
        terminal.wait_for(ANSWERING)
        terminal.wait_for_more(60)
        terminal.interrupt()
        terminal.wait_for("; stopped)")
        terminal.wait_for(READY)
        terminal.type("\x04")
        assert terminal.end() == 0
        assert terminal.settings_now() == terminal.settings
        assert "Traceback" not in terminal.seen
    finally:
        terminal.close()
    history = Path(environment["XDG_STATE_HOME"], "llamaherd", "chat_history").read_text("utf-8")
    assert "+What is my name?" in history
