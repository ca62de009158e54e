"""An SVG of how far two models' predictions are apart."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..perplexity import Comparison

__all__ = ["divergence_chart"]

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 720, 360, 64, 56, 48
_FLOOR = 1e-8  # nats: below this is rounding


def divergence_chart(found: Comparison, first: str, second: str) -> str:
    """A histogram of KL(first || second) over a logarithmic axis, with its mean and medians marked."""
    values = np.log10(np.maximum(found.divergence, _FLOOR))
    low, high = float(np.floor(values.min())), float(np.ceil(values.max()))
    high = max(high, low + 1)
    counts, edges = np.histogram(values, bins=48, range=(low, high))
    plot_width, plot_height = _WIDTH - _LEFT - 16, _HEIGHT - _TOP - _BOTTOM

    def x(value: float) -> float:
        return _LEFT + (value - low) / (high - low) * plot_width

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">KL divergence of {escape(second)} from '
        f"{escape(first)}</text>",
        f'<text x="{_LEFT}" y="42" fill="#555">{found.n_tokens} tokens, perplexity '
        f"{found.first.value:.3f} and "
        f"{found.second.value:.3f}, same top token {100 * found.top_agreement:.1f} %</text>",
    ]
    top = max(int(counts.max()), 1)
    for count, a, b in zip(counts, edges, edges[1:], strict=False):
        height = count / top * plot_height
        parts.append(
            f'<rect x="{x(a):.1f}" y="{_TOP + plot_height - height:.1f}" '
            f'width="{max(x(b) - x(a) - 1, 1):.1f}" '
            f'height="{height:.1f}" fill="#3b76af"><title>{count} tokens</title></rect>'
        )
    base = _TOP + plot_height
    parts.append(f'<line x1="{_LEFT}" y1="{base}" x2="{_LEFT + plot_width}" y2="{base}" stroke="#333"/>')
    for power in range(int(low), int(high) + 1):
        parts.append(f'<text x="{x(power):.1f}" y="{base + 18}" text-anchor="middle">1e{power}</text>')
    parts.append(
        f'<text x="{_LEFT + plot_width / 2}" y="{base + 38}" text-anchor="middle">nats a token</text>'
    )
    for name, value in (("median", np.median(found.divergence)), ("mean", found.divergence.mean())):
        at = x(float(np.log10(max(float(value), _FLOOR))))
        parts.append(
            f'<line x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{base}" stroke="#c44" '
            'stroke-dasharray="4 3"/>'
            f'<text x="{at + 4:.1f}" y="{_TOP + (12 if name == "mean" else 26)}" fill="#c44">'
            f"{name} {value:.2e}</text>"
        )
    return "\n".join([*parts, "</svg>\n"])
