"""SVG pictures of what kernels.py measured, from the lines that its --json wrote.

    python benchmarks/kernel_charts.py ROWS.json --roofline roofline.svg --shape 4096x14336
    python benchmarks/kernel_charts.py ROWS.json --ratios ratios.svg

The roofline: operations a second over operations per byte of weights, a panel a type, for ours and stock, under what memory and the byte
products allow (the most that the runs measured; F16 and BF16 are not multiplied as bytes). The ratios: how many times as fast as each other
engine, a panel a model: quotients of medians of all rounds in these files. Of a product that was measured again the last row counts.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

Row = dict[str, Any]

SERIES = ("#0067b0", "#c04a00", "#7a4fa3", "#00805a", "#8a6d00")
DARK_SERIES = ("#66b8ff", "#ff9a57", "#c9a2f0", "#4fd1a5", "#e0c04a")
MARKS = ("circle", "square", "diamond", "triangle", "cross")

PANEL, PANEL_HEIGHT, LEFT, GAP, HEAD = 232, 190, 62, 26, 92


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, nargs="+", help="files that --json wrote")
    parser.add_argument("--roofline", type=Path, metavar="SVG")
    parser.add_argument("--ratios", type=Path, metavar="SVG")
    parser.add_argument("--shape", default="4096x14336", help="of the roofline's products, KxN")
    parser.add_argument("--types", nargs="+", help="default: all that were measured")
    parser.add_argument("--threads", type=int, help="default: those of the last row")
    options = parser.parse_args()
    rows = [json.loads(line) for path in options.rows for line in path.read_text().splitlines()]
    if options.types:
        rows = [row for row in rows if row.get("type") in options.types]
    for target, mode, draw in (
        (options.roofline, "products", lambda found: roofline(found, options.shape)),
        (options.ratios, "models", ratios),
    ):
        if target is None:
            continue
        found = [row for row in rows if row["mode"] == mode]
        if mode == "products":
            found = [row for row in found if f"{row['k']}x{row['n']}" == options.shape]
        else:
            found = [row for row in found if row.get("ratios")]
        if not found:
            parser.error(f"no rows of {mode} for this picture in {', '.join(map(str, options.rows))}")
        threads = options.threads or found[-1]["threads"]
        target.write_text(draw([row for row in found if row["threads"] == threads]), encoding="utf-8")


# ------------------------------------------------------------------------------------- the two pictures


def roofline(rows: Sequence[Row], shape: str) -> str:
    """Products of one shape and number of threads."""
    last = {(row["type"], row["rows"]): row for row in rows}
    peak = max(row["peak_gops"] for row in rows)
    read = max(row["read_gigabytes"] for row in rows)

    def intensity(row: Row) -> float:
        return float(2 * row["k"] * row["n"] * row["rows"] / row["weight_bytes"])

    def gops(row: Row, path: str) -> float:
        return float(2e-9 * row["k"] * row["n"] * row["rows"] / row[path])

    speeds = [gops(row, path) for row in last.values() for path in ("ours", "stock")]
    x = Log(min(map(intensity, last.values())) / 1.3, max(map(intensity, last.values())) * 1.3)
    y = Log(min(speeds) / 1.3, max(peak, *speeds) * 1.4)
    panels = []
    for kind in dict.fromkeys(kind for kind, _ in last):
        points = [row for (of, _), row in sorted(last.items()) if of == kind]
        begin, ridge = max(x.low, y.low / read), peak / read
        roof = [(begin, begin * read), (ridge, peak)] if begin < ridge else [(x.low, peak)]
        shapes = [polyline([*roof, (x.high, peak)], x, y, "roof")]
        for series, path in enumerate(("ours", "stock")):
            places = [(intensity(row), gops(row, path)) for row in points]
            titles = [
                f"{kind}, {plural(row['rows'], 'row')}, {path}: {speed:.0f} GOPS, {speed / min(peak, at * read):.0%} of the roof"
                for row, (at, speed) in zip(points, places, strict=True)
            ]
            shapes.append(polyline(places, x, y, f"l{series}"))
            shapes += [mark(*at, x, y, series, title) for at, title in zip(places, titles, strict=True)]
        panels.append(Panel(kind, shapes))
    facts = rows[-1]
    title = f"Roofline of products with weights of {shape.replace('x', ' × ')}"
    description = (
        f"{plural(facts['threads'], 'thread')}, level {facts['level']}. Points from left to right: "
        f"{', '.join(str(n) for n in sorted({n for _, n in last}))} rows of activations. "
        f"Roof: {read:.1f} GB/s of memory read, {peak:.0f} GOPS of byte products from registers."
    )
    names = ("llamaherd-kernels", "stock llama.cpp")
    return page(
        title, description, names, panels, x, y, "operations per byte of weights", "10⁹ operations a second"
    )


def ratios(rows: Sequence[Row]) -> str:
    """Whole models of one number of threads."""
    speeds: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows:
        of_engines = speeds.setdefault((f"{row['model']} {row['type']}".strip(), row["what"]), {})
        for name, found in row["rounds"].items():
            of_engines.setdefault(name, []).extend(found)
    quotients = {
        key: {
            name: statistics.median(found["ours"]) / statistics.median(found[name])
            for name in found
            if name != "ours" and "ours" in found
        }
        for key, found in speeds.items()
    }
    works = list(dict.fromkeys(what for _, what in quotients))
    engines = list(dict.fromkeys(name for of_key in quotients.values() for name in of_key))
    values = [value for of_key in quotients.values() for value in of_key.values()]
    x = Log(min(0.8, *values) / 1.1, max(2.0, *values) * 1.1)
    y = Steps(works)
    panels = []
    for model in dict.fromkeys(model for model, _ in quotients):
        shapes = [line(x(1), 0, x(1), PANEL_HEIGHT, "roof")]
        for what in works:
            for series, name in enumerate(engines):
                value = quotients.get((model, what), {}).get(name)
                if value is not None:
                    text = f"{model}, {what}: {value:.2f} times as fast as {name}"
                    shapes.append(mark(value, what, x, y, series, text))
        panels.append(Panel(model, shapes))
    title = "llamaherd-kernels beside other engines, whole models"
    description = (
        f"How many times as fast in tokens a second, {plural(rows[-1]['threads'], 'thread')}; "
        "right of the line at 1 is faster."
    )
    labels = {
        "stock": "than stock llama.cpp",
        "ik": "than ik_llama.cpp",
        "products": "than with stock's attention",
    }
    labels["ik repacked"] = "than ik_llama.cpp, repacked"
    names = [labels.get(name, f"than {name}") for name in engines]
    return page(title, description, names, panels, x, y, "times as fast", "", left=166)


# ------------------------------------------------------------------------------------- how they are drawn


class Log:
    """A logarithmic axis of ``PANEL`` units' length, or of ``PANEL_HEIGHT`` upwards."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def __call__(self, value: float, length: float = PANEL) -> float:
        return math.log(value / self.low) / math.log(self.high / self.low) * length

    def ticks(self) -> list[tuple[float, str]]:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        steps = (1, 2, 5) if self.high / self.low < 40 else (1,)
        values = [step * 10.0**decade for decade in decades for step in steps]
        return [(value, f"{value:g}") for value in values if self.low <= value <= self.high]


class Steps:
    """A vertical axis of names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)

    def __call__(self, name: str, length: float = PANEL_HEIGHT) -> float:
        return length - (self._names.index(name) + 0.5) / len(self._names) * length

    def ticks(self) -> list[tuple[str, str]]:
        return [(name, name) for name in self._names]


class Panel:
    def __init__(self, title: str, shapes: list[str]) -> None:
        self.title, self.shapes = title, shapes


def polyline(points: Sequence[tuple[float, float]], x: Log, y: Log, style: str) -> str:
    places = " ".join(f"{x(a):.1f},{PANEL_HEIGHT - y(b, PANEL_HEIGHT):.1f}" for a, b in points)
    return f'<polyline class="{style}" points="{places}"/>'


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def mark(a: float, b: Any, x: Log, y: Callable[[Any, float], float], series: int, title: str) -> str:
    """Engines differ in colour and in form."""
    return form(x(a), PANEL_HEIGHT - y(b, PANEL_HEIGHT), series, title)


def form(at: float, up: float, series: int, title: str = "") -> str:
    path = {
        "circle": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
        "square": "M-3.5-3.5h7v7h-7z",
        "diamond": "M0-5l5 5l-5 5l-5-5z",
        "triangle": "M0-5l4.6 8h-9.2z",
        "cross": "M-5-2h3v-3h4v3h3v4h-3v3h-4v-3h-3z",
    }[MARKS[series % len(MARKS)]]
    inside = f"<title>{escape(title)}</title>" if title else ""
    return f'<path class="m{series % len(SERIES)}" transform="translate({at:.1f} {up:.1f})" d="{path}">{inside}</path>'


def page(
    title: str,
    description: str,
    names: Sequence[str],
    panels: Sequence[Panel],
    x: Log,
    y: Any,
    x_label: str,
    y_label: str,
    left: int = LEFT,
) -> str:
    """Panels with common axes: four in a row, the vertical axis' names beside the first of a row."""
    columns = min(4 if left == LEFT else 3, len(panels))
    lines = math.ceil(len(panels) / columns)
    legend = sum(34 + 7 * len(name) for name in names)
    width = left + max(columns * (PANEL + GAP), legend, 480)
    height = HEAD + lines * (PANEL_HEIGHT + 62) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-labelledby="t d" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<title id="t">{escape(title)}</title>',
        f'<desc id="d">{escape(description)}</desc>',
        style(),
        f'<rect class="page" width="{width}" height="{height}"/>',
        f'<text x="12" y="24" font-size="16">{escape(title)}</text>',
        *(
            f'<text class="quiet" x="12" y="{44 + 16 * i}">{escape(text)}</text>'
            for i, text in enumerate(wrapped(description, width // 6))
        ),
    ]
    at = left
    for series, name in enumerate(names):
        parts += [form(at, HEAD - 16, series), f'<text x="{at + 10}" y="{HEAD - 12}">{escape(name)}</text>']
        at += 34 + 7 * len(name)
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        parts.append(
            f'<g transform="translate({left + column * (PANEL + GAP)} {HEAD + 20 + row * (PANEL_HEIGHT + 62)})">'
        )
        parts.append(f'<text y="-6" font-weight="bold">{escape(panel.title)}</text>')
        parts.append(f'<rect class="panel" width="{PANEL}" height="{PANEL_HEIGHT}"/>')
        for value, text in x.ticks():
            parts.append(line(x(value), 0, x(value), PANEL_HEIGHT, "grid"))
            parts.append(
                f'<text x="{x(value):.1f}" y="{PANEL_HEIGHT + 15}" text-anchor="middle">{text}</text>'
            )
        for value, text in y.ticks():
            up = PANEL_HEIGHT - y(value, PANEL_HEIGHT)
            parts.append(line(0, up, PANEL, up, "grid"))
            if column == 0:
                parts.append(f'<text x="-6" y="{up + 4:.1f}" text-anchor="end">{escape(text)}</text>')
        parts += panel.shapes
        if row == lines - 1 or index + columns >= len(panels):
            parts.append(
                f'<text class="quiet" x="{PANEL / 2}" y="{PANEL_HEIGHT + 31}" text-anchor="middle">{escape(x_label)}</text>'
            )
        if y_label and column == 0:
            parts.append(
                f'<text class="quiet" transform="translate(-44 {PANEL_HEIGHT / 2}) rotate(-90)" text-anchor="middle">'
                f"{escape(y_label)}</text>"
            )
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def style() -> str:
    """Colours for light and dark pages."""

    def colours(series: Sequence[str]) -> str:
        return "".join(f".m{i}{{fill:{colour}}}.l{i}{{stroke:{colour}}}" for i, colour in enumerate(series))

    return (
        "<style>"
        "polyline{fill:none;stroke-width:1.5}"
        ".page{fill:#fff}.panel{fill:none;stroke:#888}.grid{stroke:#ddd}.roof{stroke:#222;stroke-width:2}"
        "text{fill:#222}.quiet{fill:#555}" + colours(SERIES) + "@media(prefers-color-scheme:dark){"
        ".page{fill:#0d1117}.grid{stroke:#2d333b}.roof{stroke:#eee}text{fill:#e6edf3}.quiet{fill:#a9b3be}"
        + colours(DARK_SERIES)
        + "}</style>"
    )


def wrapped(text: str, columns: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > columns:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


if __name__ == "__main__":
    main()
