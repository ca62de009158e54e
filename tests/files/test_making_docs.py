"""Every snippet of docs/making-files.md runs, in order, in one folder."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from llamaherd.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "making-files.md"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers").utils.logging.disable_progress_bar()
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    snippets = re.findall(r"```(sh|python)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(snippets) >= 6
    for language, code in snippets:
        if language == "python":
            exec(compile(code, str(PAGE), "exec"), namespace)
            continue
        for line in code.splitlines():
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                assert main(shlex.split(line)[1:]) == 0, line
            if "--check" in line:
                assert "bit-exact" in output.getvalue()
    assert (tmp_path / "mine.gguf").is_file()
