"""The snippets of the server's pages, run against a server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from llamaherd.cli.serve import settings_of

from .conftest import Server

pytestmark = pytest.mark.real

DOCS = Path(__file__).parents[2] / "docs"
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def snippets(page: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text("utf-8"), re.DOTALL | re.MULTILINE
    )


def test_openai_md(server: Server) -> None:
    program = "\n".join(snippets("openai.md", "python")).replace("http://127.0.0.1:8080", server.url)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    assert "576" in run.stdout


@pytest.mark.parametrize("page", ["serving.md", "lean-in-vscode.md", "openai.md", "operations.md"])
def test_curl_commands(server: Server, page: str) -> None:
    lines = "\n".join(snippets(page, "console")).splitlines()
    for command in [line[2:] for line in lines if line.startswith("$ curl")]:
        run = subprocess.run(
            ["bash", "-c", command.replace("curl ", "curl -f ").replace("http://127.0.0.1:8080", server.url)],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert run.returncode == 0, f"{command}\n{run.stdout}"


def test_the_toml_file() -> None:
    (text,) = snippets("serving.md", "toml")
    settings, _ = settings_of({}, tomllib.loads(text))
    assert list(settings.models) == ["small", "large"]
    assert settings.models["large"].params == {
        "n_threads": 8,
        "n_ctx": 4096,
        "type_k": "q8_0",
        "type_v": "q8_0",
    }
    assert settings.models["large"].memory_limit == 12 << 30
    assert settings.models_memory == 24 << 30
    assert settings.lean


def test_options_in_the_pages_exist() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "llamaherd", "serve", "--help"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(DOCS.parent / "src"), "COLUMNS": "200", "PATH": ""},
    )
    known = set(re.findall(r"--[a-z][a-z-]+", run.stdout))
    assert len(known) > 20
    elsewhere = {"--no-install-recommends", "--system", "--from", "--host", "--read-only", "--tmpfs"}
    for page in ("serving.md", "lean-in-vscode.md", "operations.md"):
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (DOCS / page).read_text("utf-8")))
        assert named <= known | elsewhere | {"--help"}, page
