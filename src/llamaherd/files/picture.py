"""A picture of a model file: where each tensor lies, coloured by type."""

from __future__ import annotations

from html import escape

from llamaherd.files.model_file import ModelFile, Tensor

__all__ = ["picture"]

_WIDTH, _ROW, _GAP, _ROWS = 1024, 14, 3, 48
_COLOURS = (
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee7733", "#009988",
)  # fmt: skip
_HEADER, _LOST = "#222222", "#eeeeee"


def picture(model: ModelFile) -> str:
    """An SVG of all parts of the model, byte after byte from left to right and top to bottom.

    Dark is the header (metadata, vocabulary); each tensor shows its name and type when pointed at.
    Tensors put together from several parts have no place of their own and are left out.
    """
    colours: dict[str, str] = {}
    for tensor in sorted(model.tensors.values(), key=lambda t: -t.nbytes):
        colours.setdefault(str(tensor.type), _COLOURS[len(colours) % len(_COLOURS)])
    scale = max(model.nbytes, 1) / (_WIDTH * _ROWS)  # bytes a pixel
    shapes: list[str] = []
    start = 0
    for index, part in enumerate(model.parts):
        placed = [t for t in model.tensors.values() if t.part == index and t.offset is not None]
        first = min((t.offset or 0 for t in placed), default=part.size)
        shapes += _bar(start, first, scale, _HEADER, f"header of {part.path.name}, {first} bytes")
        for tensor in placed:
            shapes += _bar(
                start + (tensor.offset or 0), tensor.nbytes, scale, colours[str(tensor.type)], _title(tensor)
            )
        start += part.size
    height = _ROWS * (_ROW + _GAP) + 60
    background = f'<rect width="{_WIDTH}" height="{_ROWS * (_ROW + _GAP)}" fill="{_LOST}"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="sans-serif" font-size="14">\n{background}\n'
        + "\n".join(shapes)
        + "\n"
        + _legend(colours, height - 30)
        + "\n</svg>\n"
    )


def _title(tensor: Tensor) -> str:
    return f"{tensor.name}: {tensor.type}, {' x '.join(map(str, tensor.shape))}, {tensor.nbytes} bytes"


def _bar(start: int, nbytes: int, scale: float, colour: str, title: str) -> list[str]:
    """Rectangles for bytes [start, start + nbytes): one for each row they touch."""
    at, end = start / scale, (start + nbytes) / scale
    out = []
    while at < end:
        row = int(at // _WIDTH)
        stop = min(end, (row + 1) * _WIDTH)
        x, width = at - row * _WIDTH, stop - at
        if width >= 0.02:
            out.append(
                f'<rect x="{x:.2f}" y="{row * (_ROW + _GAP)}" width="{width:.2f}" height="{_ROW}" '
                f'fill="{colour}"><title>{escape(title)}</title></rect>'
            )
        at = stop if stop > at else at + 1
    return out


def _legend(colours: dict[str, str], y: int) -> str:
    out, x = [], 0
    for name, colour in [("header", _HEADER), *colours.items()]:
        out.append(f'<rect x="{x}" y="{y}" width="16" height="16" fill="{colour}"/>')
        out.append(f'<text x="{x + 22}" y="{y + 13}">{escape(name)}</text>')
        x += 40 + 9 * len(name)
    return "\n".join(out)
