from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from tests.cli.conftest import Run
from tests.cli.terminal_process import TerminalProcess

from llamaherd import GenerationRequest, Herd, Model, SamplingConfig


def test_it_prints_what_the_model_says(llamaherd: Run, tiny_model_path: Path) -> None:
    with Model.load(tiny_model_path) as model, Herd(model, max_sequences=1) as herd:
        request = GenerationRequest("once", max_tokens=20, sampling=SamplingConfig(temperature=0))
        expected = herd.generate(request).text
    done = llamaherd("run", tiny_model_path, "once", "--max-tokens", 20, "--temperature", 0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.removesuffix("\n") == expected.removesuffix("\n")
    assert "decode 20 tokens" in done.stderr


def test_parameters_by_their_llama_cpp_names(llamaherd: Run, tiny_model_path: Path) -> None:
    done = llamaherd(
        "run", tiny_model_path, "once", "--max-tokens", 5, "--quiet", "--set", "n_batch=64",
        "--param", "use_extra_bufts=false", "--set", "type_k=f32", "--set", "logit_bias={}", "--set", "seed=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_a_prompt_too_long_says_both_counts(llamaherd: Run, tiny_model_path: Path) -> None:
    done = llamaherd("run", tiny_model_path, "-", "--n-ctx", 256, input="once upon a time " * 200)
    assert done.returncode == 1
    assert "but the context holds 256" in done.stderr


@pytest.mark.real
def test_chat_uses_the_models_template(llamaherd: Run, demo_model_path: Path) -> None:
    done = llamaherd("run", "--chat", "What is 2+2?", "--temperature", 0, "--max-tokens", 30)
    assert done.returncode == 0, done.stderr
    assert "4" in done.stdout


@pytest.mark.real
def test_ctrl_c_stops_at_once_and_leaves_the_terminal_clean(
    demo_model_path: Path, environment: dict[str, str]
) -> None:
    arguments = ["run", "demo", "Once upon a time", "--max-tokens", 4000]
    terminal = TerminalProcess(arguments, environment)
    try:
        terminal.wait_for_more(40)
        terminal.interrupt()
        began = time.monotonic()
        assert terminal.end() == 130
        assert time.monotonic() - began < 10
        assert "Traceback" not in terminal.seen
        assert "Aborted" not in terminal.seen
        assert terminal.seen.endswith("\r\n")
        assert terminal.settings_now() == terminal.settings
    finally:
        terminal.close()


@pytest.mark.real
@pytest.mark.parametrize("seconds", [0.7, 1.2, 2, 4])
def test_ctrl_c_while_loading_or_in_a_long_prefill(
    demo_model_path: Path, environment: dict[str, str], tmp_path: Path, seconds: float
) -> None:
    file = tmp_path / "long.txt"
    file.write_text("word " * 7000)
    terminal = TerminalProcess(["run", "demo", "--file", file, "--n-ctx", 8192], environment)
    try:
        time.sleep(seconds)
        terminal.interrupt()
        assert terminal.end(20) in (130, -signal.SIGINT)  # the latter while Python itself still starts
        assert "ignored" not in terminal.seen
        assert terminal.settings_now() == terminal.settings
    finally:
        terminal.close()
