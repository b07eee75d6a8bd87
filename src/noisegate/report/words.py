"""A verdict in plain words, for the top of each page."""

from typing import Any

from noisegate.checks import rounded
from noisegate.redteam.findings import by_chance
from noisegate.report.facets import attack_maps, told_of
from noisegate.report.folders import RunRecord, number
from noisegate.report.page import Page, paragraph
from noisegate.report.sweeps import SweepRecord, mean
from noisegate.report.targets import share_of

MOST_AGGREGATORS = 5
"""The largest number of aggregators whose worst attack is told."""

Verdict = tuple[str, list[str]]
"""The sentence that matters most, and those that explain it. All empty if there is nothing to say."""


def verdict_section(page: Page, words: Verdict) -> None:
    """The verdict above all numbers. Nothing if there is none."""
    first, more = words
    if first:
        page.section("In short", paragraph(first, "lead"), paragraph(" ".join(more)), kind="verdict")


def of_run(record: RunRecord) -> Verdict:
    """What a run found: what the attack cost, by the reference, and what it would have cost undefended."""
    result = record.result
    if result is None:
        return "", []
    accuracy, examples = float(result["accuracy"]), tested(result)
    attackers, total = result["byzantine_workers"], result["byzantine_workers"] + result["workers"]
    attacked = attackers > 0 and result.get("attack") not in (None, "none")
    clean = record.beside.get("reference")
    more = []
    if attacked:
        more.append(
            f"{attackers} of {total} workers attacked ({result['attack']}), the server used {result['aggregator']}."
        )
    if clean and attacked:
        more.append(
            f"The model is right on {accuracy:.1%} of the test examples; without attackers on {clean['accuracy']:.1%}."
        )
    elif attacked:
        more.append(f"The model is right on {accuracy:.1%} of the test examples.")
    if attacked and "undefended" in record.beside:
        more.append(f"Undefended it would be right on {record.beside['undefended']['accuracy']:.1%}.")
    more.append(_privacy(result))
    return _lead(result, clean, attacked, examples), more


def _lead(result: dict[str, Any], clean: dict[str, Any] | None, attacked: bool, examples: int) -> str:
    accuracy, majority = float(result["accuracy"]), share_of(result, "majority_share")
    if majority is not None and examples and accuracy <= majority + by_chance(majority, examples):
        return "The model learned next to nothing: always answering the most frequent class is as good."
    if not attacked:
        return f"The model is right on {accuracy:.1%} of the test examples; nobody attacked."
    if clean is None:
        return "What the attack cost is not known: the reference was not run, or is not in this folder."
    cost = clean["accuracy"] - accuracy
    if examples and cost <= by_chance(clean["accuracy"], examples):
        return "The attack did no harm to accuracy that could be told from chance."
    if cost <= 0:
        return "The attack did no harm to accuracy."
    return f"The attack cost {100 * cost:.1f} points of accuracy."


def _privacy(result: dict[str, Any]) -> str:
    if result["sigma"] == 0 or not number(result.get("epsilon")):
        return "Nothing is private: no noise was added."
    return f"Each example is protected by epsilon {rounded(result['epsilon'], 3)} at delta {result['delta']:.2g}."


def tested(result: dict[str, Any] | None) -> int:
    """The number of test examples of a result; 0 if it does not say."""
    found = (result or {}).get("confusion")
    return sum(map(sum, found)) if found else 0


def of_sweep(record: SweepRecord) -> Verdict:
    """What a sweep found: the worst attack on each aggregator, or else the best and the worst setting."""
    done = [group for group in record.groups if group.accuracies and group.role != "reference"]
    if not done:
        return "", []
    maps = attack_maps(record)
    more = [] if any(len(group.cells) > 1 for group in record.groups) else [ONE_SEED]
    if maps:
        worst: dict[str, tuple[float, str]] = {}
        for found in maps:
            where = f", {found.title}" if found.title else ""
            for name in found.aggregators:
                lowest = found.worst(name)
                if lowest and lowest[0] < worst.get(name, (2.0, ""))[0]:
                    worst[name] = lowest[0], f"{lowest[1]}{where}"
        first, *rest = sorted(worst.items(), key=lambda entry: -entry[1][0])
        told = [f"{name} falls to {value:.3f} ({by})" for name, (value, by) in rest[:MOST_AGGREGATORS]]
        told += [f"{len(rest) - MOST_AGGREGATORS} more are below"] if len(rest) > MOST_AGGREGATORS else []
        name, (value, by) = first
        return f"{name} withstands these attacks best: at worst {value:.3f} ({by}).", [
            *([f"{'; '.join(told)}."] if told else []),
            *more,
        ]
    if len(done) == 1:
        return f"Accuracy {mean(done[0].accuracies):.3f}.", more
    best, worst_one = (pick(done, key=lambda group: mean(group.accuracies)) for pick in (max, min))
    ends = [f"{mean(group.accuracies):.3f} ({told_of(record, group)})" for group in (worst_one, best)]
    return f"Accuracy goes from {ends[0]} to {ends[1]}.", more


ONE_SEED = "Each setting was run with one seed: small differences may be chance."
