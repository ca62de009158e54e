"""Cut every architecture that can be synthesised, compare whole and slices, and print the table in Markdown.

python scripts/slice_table.py > docs/sharding-table.md
"""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

from llamaherd import files
from llamaherd.cli.slice_check import compare_slices
from llamaherd.errors import UnsupportedFileError
from llamaherd.files.architectures import ARCHITECTURES, Architecture
from llamaherd.files.cut_rules import CUT_RULES, OVERWRITTEN_INPUT, UNCUTTABLE
from llamaherd.files.slice import slice_model
from llamaherd.files.synthesize import synthesize
from llamaherd.native.library import library_info

TYPES = ("f32", "q8_0", "q4_0")

HEAD = """# Which architectures can be cut

Each row is a tiny random model, run whole and as three slices in a chain: a prompt of 48 tokens in one batch,
then 12 greedy ones. The numbers are the largest difference of any logit; 0 means bit for bit.
Made by `python scripts/slice_table.py` with llama-cpp-python {version}.

| model | architecture in GGUF | cuts | f32 | q8_0 | q4_0 |
|---|---|---|---|---|---|"""


def cuts_of(row: Architecture) -> list[int]:
    """Three slices: one layer first, and off every pattern that may be cut through."""
    period = CUT_RULES[row.gguf].period if row.gguf in CUT_RULES else 1
    return [0, 1, 4, 6] if period == 1 else [0, period, 2 * period, 2 * period + 1]


def largest_difference(row: Architecture, type: str, cuts: list[int], folder: Path) -> float:
    """The largest difference of any logit between a tiny model and its slices."""
    whole = synthesize(folder / "whole.gguf", row.name, layers=cuts[-1], type=type)
    with files.open(whole) as model:
        parts = [
            slice_model(model, start, end, folder / f"part-{start}.gguf")[0] for start, end in pairwise(cuts)
        ]
    return compare_slices(whole, parts, n_prompt=48, n_tokens=12).largest


def line(row: Architecture, folder: Path) -> str:
    """The table's row."""
    cuts = cuts_of(row)
    try:
        found = [f"{largest_difference(row, type, cuts, folder):g}" for type in TYPES]
    except UnsupportedFileError as error:
        reason = UNCUTTABLE.get(row.gguf, str(error))
        if row.gguf in OVERWRITTEN_INPUT:
            reason += f"; exact where a stage overwrites `{OVERWRITTEN_INPUT[row.gguf].input_node}`"
        return f"| {row.name} | {row.gguf} | refused: {reason} | | | |"
    return f"| {row.name} | {row.gguf} | {', '.join(map(str, cuts))} | {' | '.join(found)} |"


def main() -> None:
    """Print the page."""
    print(HEAD.format(version=library_info()["llama_cpp_python"]))
    with tempfile.TemporaryDirectory() as folder:
        for row in ARCHITECTURES.values():
            print(line(row, Path(folder)), flush=True)
    others = sorted(set(UNCUTTABLE) - {row.gguf for row in ARCHITECTURES.values()})
    print("\nRefused as well, from llama.cpp's source and without a trial:\n")
    for name in others:
        print(f"- `{name}`: {UNCUTTABLE[name]}")
    print(
        "\n`slice_model(..., overwrite_input=True)` cuts those marked with a graph node that a stage "
        "overwrites: it writes the hidden states into that node when llama.cpp has computed it, which undoes "
        "what the graph did to its input. The slices name the node under `llamaherd.slice.input_node`."
    )
    print(
        "\nAn architecture that is on neither list is refused until it has been tried; `--unlisted` cuts it "
        "all the same, and `--check` tells whether that was right."
    )


if __name__ == "__main__":
    main()
