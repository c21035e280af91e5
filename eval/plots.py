"""Small plots as SVG, written by hand: lines over a number, with intervals. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

# x, y, low, high
Point = tuple[float, float, float, float]

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 150, 34, 42
# Told apart by people who see colours differently (Okabe and Ito, 2008).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def lines(title: str, x_label: str, y_label: str, series: Mapping[str, Sequence[Point]]) -> str:
    """Shares (0 to 1) over ``x``, a line per series with bars for the intervals."""
    xs = sorted({point[0] for points in series.values() for point in points})
    if not xs:
        return ""
    low, high = xs[0], xs[-1] if xs[-1] > xs[0] else xs[0] + 1
    inner_w, inner_h = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (x - low) / (high - low) * inner_w, _TOP + (1 - y) * inner_h

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = at(low, share)[1]
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + inner_w}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{100 * share:.0f} %</text>')
    parts += [
        f'<text x="{at(x, 0)[0]:.1f}" y="{_TOP + inner_h + 16}" text-anchor="middle">{x:g}</text>' for x in xs
    ]
    parts.append(
        f'<text x="{_LEFT + inner_w / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>'
    )
    parts.append(
        f'<text transform="translate(12 {_TOP + inner_h / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    for i, (name, points) in enumerate(series.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        places = [at(x, y) for x, y, _, _ in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y, least, most in sorted(points):
            px, py = at(x, y)
            top, bottom = at(x, most)[1], at(x, least)[1]
            parts.append(
                f'<line x1="{px:.1f}" y1="{top:.1f}" x2="{px:.1f}" y2="{bottom:.1f}" stroke="{colour}"'
                ' stroke-opacity="0.45"/>'
            )
            parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>')
        y = _TOP + 8 + 18 * i
        parts.append(f'<rect x="{_WIDTH - _RIGHT + 14}" y="{y}" width="12" height="3" fill="{colour}"/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT + 32}" y="{y + 6}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
