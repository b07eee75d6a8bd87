"""The findings of a search as a chart against the Byzantine share, in an HTML file that loads nothing."""

from typing import Any

from noisegate.redteam.findings import Findings, Trial
from noisegate.redteam.objectives import word_of
from noisegate.redteam.settings import BEHAVED

WITHOUT = "without an attack"
"""The name of the run in which Byzantine workers behave."""

SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star")
"""The markers of lines. Their number and that of the colors have no common divisor, so few lines look alike."""


def plot(found: Findings) -> str:
    """The chart as an HTML page.

    Each attack has a line through its worst case at each share at which it was tried. The run without an attack is a
    point, and the reference a horizontal line.
    """
    from plotly import colors, graph_objects, io  # here, since only a plot needs it

    measure, word = found.measure, word_of(found.measure.objective)
    figure = graph_objects.Figure()
    for number, (name, trials) in enumerate(_lines(found).items()):
        figure.add_scatter(
            x=[trial.spec.byzantine for trial in trials],
            y=[measure.value(trial.outcome) for trial in trials],
            text=[describe(trial) for trial in trials],
            name=name,
            mode="lines+markers",
            marker={"symbol": SYMBOLS[number % len(SYMBOLS)], "size": 8},
            hovertemplate=f"%{{text}}<br>share %{{x:.0%}}, {word} %{{y:.3f}}<extra></extra>",
        )
    clean = measure.value(found.yardsticks.reference.outcome)
    if measure.objective != "recall" and clean is not None:  # a drop is from there, and has no line
        names = {"accuracy": "Reference Accuracy", "backdoor": "the same trigger in the reference"}
        name = names.get(measure.objective, f"{word} of the reference")
        figure.add_hline(y=clean, line_dash="dash", annotation_text=f"{name} {clean:.3f}")
    settings = found.spec.canonical()
    figure.update_layout(
        title=f"Worst case found: {part(settings['aggregator'])} on {settings['dataset']}, seed {found.spec.seed}",
        template="plotly_white",
        colorway=colors.qualitative.Dark24,
        xaxis={"title": "Byzantine share of all workers", "tickformat": ".0%", "range": [0, 1]},
        yaxis={"title": f"{word} at the last round", "range": [0, 1]},
        legend={"title": "attack"},
    )
    page: str = io.to_html(figure, include_plotlyjs=True, div_id="plot", config={"displaylogo": False})
    return page


def _lines(found: Findings) -> dict[str, list[Trial]]:
    """The worst case of each attack at each share, by attack. The worst attack at the spec's own share is first."""
    lines: dict[str, list[Trial]] = {trial.attack: [] for trial in found.worst_by_attack(found.spec.byzantine)}
    for share in found.shares():
        for trial in found.worst_by_attack(share):
            lines[trial.attack].append(trial)
    lines[WITHOUT] = [found.yardsticks.behaved]
    known = found.measure.value
    ended = {
        name: [trial for trial in trials if trial.ended and known(trial.outcome) is not None]
        for name, trials in lines.items()
    }
    return {name: trials for name, trials in ended.items() if trials}


def describe(trial: Trial) -> str:
    """The attack of a trial, with the settings that are not its defaults, and its start."""
    if trial.attack == BEHAVED:
        return WITHOUT
    told = part(trial.spec.canonical()["attack"])
    if trial.spec.attack_start == 0:
        return told
    asleep = ", copying until then" if trial.spec.attack_asleep == "copy" else ""
    return f"{told} from {trial.spec.attack_start:g}{asleep}"


def part(settings: Any) -> str:
    """The name of an attack, aggregator or worker, with the settings that were chosen in parentheses."""
    if not isinstance(settings, dict):
        return str(settings)
    chosen = ", ".join(f"{key} {part(value)}" for key, value in settings.items() if key != "name")
    return f"{settings['name']} ({chosen})" if chosen else str(settings["name"])
