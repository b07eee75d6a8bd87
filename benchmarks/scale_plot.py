"""A small log-log chart as SVG: panels side by side, one line per series, a dashed guide of slope one."""

import math
from collections.abc import Callable

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 420, 330, 62, 38, 16, 50
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600 }
.grid { stroke: #d0d7de } .guide { stroke: #8c959f; stroke-dasharray: 5 4; fill: none }
.s0 { stroke: #0969da; fill: none } .d0 { fill: #0969da } .s1 { stroke: #bc4c00; fill: none } .d1 { fill: #bc4c00 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .grid { stroke: #30363d } .guide { stroke: #7d8590 }
  .s0 { stroke: #58a6ff } .d0 { fill: #58a6ff } .s1 { stroke: #f0883e } .d1 { fill: #f0883e }
}
</style>"""

Points = list[tuple[float, float]]


def svg(panels: dict[str, dict[str, Points]]) -> str:
    """The chart. All panels share the vertical axis, milliseconds per round."""
    ys = [y for series in panels.values() for points in series.values() for _, y in points]
    low, high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))
    total = WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {HEIGHT}" width="{total}" role="img">',
        f"<title>Milliseconds per round against {' and against '.join(panels)}</title>{STYLE}",
    ]
    for place, (title, series) in enumerate(panels.items()):
        parts += [f'<g transform="translate({place * WIDTH} 0)">', *_panel(title, series, low, high), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(title: str, series: dict[str, Points], low: int, high: int) -> list[str]:
    xs = [x for points in series.values() for x, _ in points]
    left, right = math.floor(math.log10(min(xs))), math.ceil(math.log10(max(xs)))

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - left) / max(1, right - left) * (WIDTH - LEFT - RIGHT)
        up = (math.log10(y) - low) / max(1, high - low) * (HEIGHT - TOP - BOTTOM)
        return round(LEFT + across, 1), round(HEIGHT - BOTTOM - up, 1)

    parts = [f'<text class="title" x="{LEFT}" y="18">ms per round against {title}</text>']
    for power in range(left, right + 1):
        (x, bottom), (_, top) = at(10**power, 10**low), at(10**power, 10**high)
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{bottom}" y2="{top}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{_tick(power)}</text>')
    for power in range(low, high + 1):
        (start, y), (end, _) = at(10**left, 10**power), at(10**right, 10**power)
        parts.append(f'<line class="grid" x1="{start}" x2="{end}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{start - 6}" y="{y + 4}" text-anchor="end">{_tick(power)}</text>')
    for number, (name, points) in enumerate((name, sorted(points)) for name, points in series.items() if points):
        marks = [at(x, y) for x, y in points]
        corners = " ".join(f"{x},{y}" for x, y in marks)
        parts.append(f'<polyline class="s{number}" stroke-width="2" points="{corners}"/>')
        parts += [f'<circle class="d{number}" cx="{x}" cy="{y}" r="3.5"/>' for x, y in marks]
        parts.append(_guide(points, at, 10**low))
        key = LEFT + 8 + 150 * number
        parts.append(f'<circle class="d{number}" cx="{key}" cy="{HEIGHT - 10}" r="4"/>')
        parts.append(f'<text x="{key + 9}" y="{HEIGHT - 6}">{name}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">dashed: slope 1</text>')
    return parts


def _guide(points: Points, at: Callable[[float, float], tuple[float, float]], lowest: float) -> str:
    """From the last point down in proportion, as far as the axis goes: what lies above it grows slower than that."""
    (first, _), (last, end) = points[0], points[-1]
    start = max(first, last * lowest / end)
    (x1, y1), (x2, y2) = at(start, end * start / last), at(last, end)
    return f'<line class="guide" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'


def _tick(power: int) -> str:
    for size, letter in ((9, "G"), (6, "M"), (3, "k")):
        if power >= size:
            return f"{10 ** (power - size):,}{letter}"
    return f"{10**power:g}"
