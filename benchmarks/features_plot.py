"""Accuracy against epsilon as SVG: a panel for each data set, a line for each way of training."""

import math

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 300, 290, 40, 34, 10, 66
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600 }
.grid { stroke: #d0d7de }
.s0 { stroke: #8c959f; fill: none } .d0 { fill: #8c959f } .s1 { stroke: #bc4c00; fill: none } .d1 { fill: #bc4c00 }
.s2 { stroke: #0969da; fill: none } .d2 { fill: #0969da }
.s3 { stroke: #57606a; stroke-dasharray: 5 4; fill: none } .d3 { fill: #57606a }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .grid { stroke: #30363d }
  .s0 { stroke: #7d8590 } .d0 { fill: #7d8590 } .s1 { stroke: #f0883e } .d1 { fill: #f0883e }
  .s2 { stroke: #58a6ff } .d2 { fill: #58a6ff } .s3 { stroke: #9198a1 } .d3 { fill: #9198a1 }
}
</style>"""
NAMES = ("the paper", "our defaults", "features", "features, no privacy")
STEP = 0.1

Points = list[tuple[float, float]]


def svg(panels: dict[str, dict[str, Points]]) -> str:
    """The chart: panels side by side, each with an axis of its own."""
    total = WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {HEIGHT}" width="{total}" role="img">',
        f"<title>Accuracy against epsilon: {', '.join(panels)}</title>{STYLE}",
    ]
    for place, (title, lines) in enumerate(panels.items()):
        parts += [f'<g transform="translate({place * WIDTH} 0)">', *_panel(title, lines), "</g>"]
    for number, name in enumerate(NAMES):
        x = LEFT + 8 + 150 * number
        parts.append(f'<circle class="d{number}" cx="{x}" cy="{HEIGHT - 12}" r="4"/>')
        parts.append(f'<text x="{x + 10}" y="{HEIGHT - 8}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(title: str, lines: dict[str, Points]) -> list[str]:
    epsilons = sorted({x for points in lines.values() for x, _ in points})
    values = [y for points in lines.values() for _, y in points]
    low, high = math.floor(min(values) / STEP) * STEP, math.ceil(max(values) / STEP) * STEP

    def at(epsilon: float, accuracy: float) -> tuple[float, float]:
        wide = math.log2(epsilons[-1] / epsilons[0])
        across = (math.log2(epsilon / epsilons[0]) / wide if wide else 0.5) * (WIDTH - LEFT - RIGHT - 12)
        up = (accuracy - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return round(LEFT + 6 + across, 1), round(HEIGHT - BOTTOM - up, 1)

    parts = [f'<text class="title" x="{LEFT}" y="18">{title}</text>']
    for number in range(round((high - low) / STEP) + 1):
        y = at(epsilons[0], low + number * STEP)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{low + number * STEP:.1f}</text>')
    for epsilon in epsilons:
        x, y = at(epsilon, low)
        parts.append(f'<text x="{x}" y="{y + 18}" text-anchor="middle">{epsilon:g}</text>')
    for name, points in lines.items():
        number, marks = NAMES.index(name), [at(*point) for point in sorted(points)]
        corners = " ".join(f"{x},{y}" for x, y in marks)
        parts.append(f'<polyline class="s{number}" stroke-width="2" points="{corners}"/>')
        parts += [f'<circle class="d{number}" cx="{x}" cy="{y}" r="3.5"/>' for x, y in marks]
    return parts
