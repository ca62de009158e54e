"""Every snippet of README.md and of the pages in docs/ runs, each page in a folder of its own.

- The ``python`` blocks of a page are one script; it runs after the page's ``console`` blocks.
- In a ``console`` block, lines that begin with ``$ `` are run by the shell and must succeed; what follows
  shows their output and is not compared. In an ``sh`` block every line is a command.
- A block is left alone when the line before it is ``<!-- not run: why -->``.
- ``model.gguf`` is a copy of the demo model in the folder that snippets run in.

Pages that have a test of their own are listed in ``ELSEWHERE``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "making-files.md",
    "sharding-table.md",
    "serving.md",
    "openai.md",
    "lean-in-vscode.md",
    "operations.md",
    "transformers.md",
}
DOCS = sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in ELSEWHERE)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
BLOCK = re.compile(
    r"(?P<skip><!-- not run: [^\n]+ -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
LANGUAGES = {"python", "console", "sh", "text", "makefile", "json"}


def blocks(page: Path) -> list[tuple[str, str, int]]:
    """Language, code and line of each block to run; an unknown language is an error, so that none is lost."""
    text = page.read_text("utf-8")
    found = []
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code"))
        assert match["language"] in LANGUAGES, f"{page}:{line}: no rule for {match['language']!r} blocks"
        if not match["skip"] and match["language"] in ("python", "console", "sh"):
            found.append((match["language"], match["code"], line))
    return found


def commands(language: str, code: str) -> list[str]:
    """The commands of a console or sh block; a line that ends in a backslash goes on."""
    lines = code.replace("\\\n", "").splitlines()
    if language == "sh":
        return [line for line in lines if line.strip() and not line.startswith("#")]
    return [line[2:] for line in lines if line.startswith("$ ")]


@pytest.mark.real
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: str(page.name))
def test_the_page_runs(page: Path, tmp_path: Path, demo_model_path: Path) -> None:
    shutil.copyfile(demo_model_path, tmp_path / "model.gguf")  # no link: a page may write there
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "llamaherd"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m llamaherd "$@"\n')
    script.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{script.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "PYTHONUTF8": "1",
        "HOME": str(tmp_path),
    }
    script_lines: list[str] = []
    for language, code, line in blocks(page):
        if language == "python":
            script_lines += [""] * (
                line - len(script_lines)
            ) + code.splitlines()  # at their lines in the page
            continue
        for command in commands(language, code):
            run = subprocess.run(
                ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
            assert run.returncode == 0, f"{page.name}:{line}: {command}\n{run.stdout}\n{run.stderr}"
    (tmp_path / "page.py").write_text("\n".join(script_lines), "utf-8")
    run = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, f"{page.name}\n{run.stderr}"


def test_every_page_is_reachable_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert f"docs/{page.name}" in readme, f"README.md does not mention docs/{page.name}"


@pytest.mark.parametrize("page", sorted({*PAGES, *(ROOT / "docs").glob("*.md")}), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
