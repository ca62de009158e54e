"""A plan as a picture."""

from __future__ import annotations

from html import escape

from .plan import Plan

__all__ = ["picture"]

_WIDTH, _ROW, _LEFT = 900, 26, 150
_COLOURS = (("weights", "#4477aa"), ("kv_cache", "#ccbb44"), ("compute", "#aa3377"))


def picture(plan: Plan) -> str:
    """An SVG: one bar a node, as long as its memory, with what it will hold."""
    most = max(share.node.memory for share in plan.shares)
    scale = (_WIDTH - _LEFT - 20) / most
    rows = [f'<text x="10" y="20" font-weight="bold">{escape(plan.costs.name)}</text>']
    for index, share in enumerate(plan.shares):
        y = 36 + index * _ROW
        rows.append(
            f'<text x="10" y="{y + 14}">{escape(share.node.name)}: {share.start}-{share.end - 1}</text>'
        )
        width = share.node.memory * scale
        rows.append(f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_ROW - 6}" fill="#dddddd"/>')
        x = float(_LEFT)
        for field, colour in _COLOURS:
            size = getattr(share, field)
            title = f"<title>{field.replace('_', ' ')}: {size / 2**20:.1f} MiB</title>"
            rows.append(
                f'<rect x="{x:.1f}" y="{y}" width="{size * scale:.1f}" height="{_ROW - 6}" '
                f'fill="{colour}">{title}</rect>'
            )
            x += size * scale
    y = 60 + len(plan.shares) * _ROW
    x = 10.0
    for field, colour in _COLOURS:
        rows.append(f'<rect x="{x}" y="{y - 11}" width="12" height="12" fill="{colour}"/>')
        rows.append(f'<text x="{x + 18}" y="{y}">{field.replace("_", " ")}</text>')
        x += 110
    together = plan.together(plan.sequences)
    speed = f"predicted {plan.alone:.3g} tokens/s alone, {together:.3g} with {plan.sequences}"
    rows.append(f'<text x="{x}" y="{y}">{speed}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 16}" '
        f'font-family="sans-serif" font-size="13">\n' + "\n".join(rows) + "\n</svg>\n"
    )
