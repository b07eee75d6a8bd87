"""The page of a partition: the classes that each worker holds."""

from noisegate.paper.partition_figure import PRIVATE, WHERE, Distribution
from noisegate.report.charts import LINES, Chart, layout_of, short
from noisegate.report.page import Page, Shade, paragraph, table
from noisegate.report.words import verdict_section

PATTERNS = ("", "/", "x", ".")
"""The patterns of bars, which tell classes apart where there are more of them than colors."""


def partition_page(found: Distribution) -> Page:
    """A stacked bar for each worker, and the same as a table."""
    workers, classes = found.shares.shape
    page = Page(f"Partition: {found.dataset}", f"{workers} workers, {classes} classes")
    page.section("Not to be published", paragraph(f"{PRIVATE[:1].upper()}{PRIVATE[1:]}."), kind="problems")
    first = f"A worker's classes differ from those of all by {found.distance:.2f} on average."
    lowest, highest = float(found.shares.min()), float(found.shares.max())
    more = [
        f"That is the total variation: 0 if all workers hold the same mix, near 1 if each holds classes of its own. "
        f"The share of a class in a worker's examples goes from {lowest:.0%} to {highest:.0%}.",
        f"In the paper: {WHERE}.",
    ]
    verdict_section(page, (first, more))
    label = f"Share of each class in each worker's examples, from {lowest:.2f} to {highest:.2f}"
    columns = ["worker", *(f"class {label}" for label in range(classes))]
    top = max(highest, 1e-9)
    rows = [
        (number, *(Shade(f"{share:.2f}", share / top) for share in shares))
        for number, shares in enumerate(found.shares.tolist(), 1)
    ]
    page.section("Classes by worker", page.chart(_bars(found), label, "", table(columns, rows, dense=True)))
    return page


def _bars(found: Distribution) -> Chart:
    names = [str(number) for number in range(1, len(found.shares) + 1)]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": f"class {label}",
            "y": names,
            "x": [short(share) for share in found.shares[:, label].tolist()],
            "marker": {
                "color": LINES[label % len(LINES)],
                "pattern": {
                    "shape": PATTERNS[label // len(LINES) % len(PATTERNS)],
                    "fillmode": "overlay",
                    "fgcolor": "--card",
                },
                "line": {"color": "--card", "width": 1},
            },
            "hovertemplate": f"worker %{{y}}: %{{x:.1%}} class {label}<extra></extra>",
        }
        for label in range(found.shares.shape[1])
    ]
    layout = layout_of("share of the worker's examples", "worker", x_range=[0, 1])
    layout["xaxis"]["tickformat"] = ".0%"
    layout["yaxis"] |= {"autorange": "reversed", "type": "category", "showgrid": False}
    layout["legend"]["traceorder"] = "normal"
    layout["margin"]["r"] = 28
    layout |= {"barmode": "stack", "height": min(900, 160 + 22 * len(names))}
    return {"data": data, "layout": layout}
