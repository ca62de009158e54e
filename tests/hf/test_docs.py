"""docs/transformers.md: its snippets, one after another."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"


def test_every_snippet_runs(tiny):
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(snippets) > 10
    names = {"MODEL": tiny()}
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"{PAGE.name}, snippet {number}", "exec"), names)
