"""What a search found as a picture: accuracy against the Byzantine share, in one file that loads nothing."""

from typing import Any

from noisegate.redteam.search import BEHAVED, Findings, Trial

WITHOUT = "without an attack"

SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star")
"""As many as have no divisor in common with the number of colors, so that both repeat only together."""


def plot(found: Findings) -> str:
    """HTML. A line for each attack, through its worst case at each share at which it was tried; what there is without.

    The reference is a line across.
    """
    from plotly import colors, graph_objects, io  # here, since only a plot needs it

    figure = graph_objects.Figure()
    for number, (name, trials) in enumerate(_lines(found).items()):
        figure.add_scatter(
            x=[trial.spec.byzantine for trial in trials],
            y=[trial.accuracy for trial in trials],
            text=[describe(trial) for trial in trials],
            name=name,
            mode="lines+markers",
            marker={"symbol": SYMBOLS[number % len(SYMBOLS)], "size": 8},
            hovertemplate="%{text}<br>share %{x:.0%}, accuracy %{y:.3f}<extra></extra>",
        )
    clean = found.yardsticks.reference.accuracy
    figure.add_hline(y=clean, line_dash="dash", annotation_text=f"Reference Accuracy {clean:.3f}")
    settings = found.spec.canonical()
    figure.update_layout(
        title=f"Worst case found: {part(settings['aggregator'])} on {settings['dataset']}, seed {found.spec.seed}",
        template="plotly_white",
        colorway=colors.qualitative.Dark24,
        xaxis={"title": "Byzantine share of all workers", "tickformat": ".0%", "range": [0, 1]},
        yaxis={"title": "accuracy at the last round", "range": [0, 1]},
        legend={"title": "attack"},
    )
    page: str = io.to_html(figure, include_plotlyjs=True, div_id="plot", config={"displaylogo": False})
    return page


def _lines(found: Findings) -> dict[str, list[Trial]]:
    """By attack, its worst case at each share; the attack that is worst at the spec's own share first, none last."""
    lines: dict[str, list[Trial]] = {trial.attack: [] for trial in found.worst_by_attack(found.spec.byzantine)}
    for share in found.shares():
        for trial in found.worst_by_attack(share):
            lines[trial.attack].append(trial)
    lines[WITHOUT] = [found.yardsticks.behaved]
    ended = {name: [trial for trial in trials if trial.outcome.status == "done"] for name, trials in lines.items()}
    return {name: trials for name, trials in ended.items() if trials}


def describe(trial: Trial) -> str:
    """The attack with all settings that are not its defaults, and when it begins."""
    if trial.attack == BEHAVED:
        return WITHOUT
    told = part(trial.spec.canonical()["attack"])
    if trial.spec.attack_start == 0:
        return told
    asleep = ", copying until then" if trial.spec.attack_asleep == "copy" else ""
    return f"{told} from {trial.spec.attack_start:g}{asleep}"


def part(settings: Any) -> str:
    """A part's name, and in parentheses the settings that were chosen."""
    if not isinstance(settings, dict):
        return str(settings)
    chosen = ", ".join(f"{key} {part(value)}" for key, value in settings.items() if key != "name")
    return f"{settings['name']} ({chosen})" if chosen else str(settings["name"])
