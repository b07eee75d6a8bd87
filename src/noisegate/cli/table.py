"""What a run found, and what it cost, for people."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from noisegate.checks import rounded
from noisegate.cli.privacy import what_delta_means
from noisegate.cli.terminal import Console
from noisegate.privacy import IN_WORDS
from noisegate.privacy.statement import COMMON_DELTA
from noisegate.redteam.plot import part
from noisegate.runs import Result, Spec, imbalance
from noisegate.runs.costs import Bill
from noisegate.runs.promise import STATED
from noisegate.runs.recall import worst_class

MOST_MESSAGE = 300
"""Characters of a run's message that are shown."""

Row = tuple[str, str, str]
"""What a line is about, its number, and what the number means."""


def show_result(result: Result, proportion: Mapping[str, Any], cost: Bill, out: Path) -> None:
    """Print the short table that ends a run.

    proportion: what the reference, the undefended run and the one without noise found, if they were run. cost: of all
    runs together.
    """
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim", overflow="fold")
    priced = "noiseless_accuracy" in proportion
    rows = *_accuracy(result, proportion), *_promise(result, cost, priced), *_uploads(result), _time(result)
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(table)
    console.print(f"written to {out}", style="dim", soft_wrap=True)
    if result.epsilon is not None and not result.secret:
        research = "for research: whoever has the seed has the noise. Train with --secret what you give away."
        console.print(research, style="dim", soft_wrap=True)


def _accuracy(result: Result, proportion: Mapping[str, Any]) -> Iterator[Row]:
    """How accurate the model is, and what that is to be compared with."""
    total, aggregator = result.workers + result.byzantine_workers, part(result.spec["aggregator"])
    attacked = result.byzantine_workers > 0 and part(result.spec["attack"]) != "none"
    workers = f"{result.byzantine_workers} of {total} workers ({result.byzantine:.0%})"
    beside = f"against {part(result.spec['attack'])} by {workers}" if attacked else f"with {total} workers, all honest"
    yield "accuracy", f"{result.accuracy:.3f}", f"{aggregator} {beside}"
    if result.believed_byzantine is not None:
        yield "Byzantine assumed", f"{result.believed_byzantine}", _assumption(result)
    if "reference_accuracy" in proportion:
        clean, averaged = proportion["reference_accuracy"], proportion["undefended_accuracy"]
        yield "reference accuracy", f"{clean:.3f}", "same private training, no attackers, plain mean"
        yield "undefended", f"{averaged:.3f}", f"plain mean {'under the same attack' if attacked else 'of all workers'}"
    if "noiseless_accuracy" in proportion:
        yield "without noise", f"{proportion['noiseless_accuracy']:.3f}", price_of(proportion)
    if imbalance.uneven(result.as_dict()):
        yield from _classes(result, proportion)
    if (worst := imbalance.worst_worker(result.as_dict())) is not None:
        yield "worst worker", f"{worst.accuracy:.3f}", worst.sentence()
    for name, value in (result.metrics or {}).items():
        clean = (proportion.get("reference_metrics") or {}).get(name)
        yield name, "–" if value is None else f"{value:.3f}", "" if clean is None else f"{clean:.3f} in the reference"
    yield from _targets(result, proportion)
    if result.class_rates:
        rates = ", ".join(f"{rate:.3g}" for rate in result.class_rates)
        yield "class rates", f"{max(result.class_rates):.3g}", f"chance of an example by its class: {rates}"
    if result.spec["worker"]["name"] != "normalized":
        yield "worker", "", f"{part(result.spec['worker'])}, batch {result.spec['batch']}, rate {result.spec['rate']:g}"


def price_of(proportion: Mapping[str, Any]) -> str:
    """What a run without noise is, and what privacy costs beside the reference."""
    text, clean = "no privacy, no attackers, plain mean, base rate", proportion.get("reference_accuracy")
    return text if clean is None else f"{text}; privacy costs {proportion['noiseless_accuracy'] - clean:+.3f}"


def _classes(result: Result, proportion: Mapping[str, Any]) -> Iterator[Row]:
    """What accuracy hides where there are two classes, or uneven ones. Older results have none of it."""

    def beside(name: str) -> str:
        clean, bare = proportion.get(f"reference_{name}"), proportion.get(f"noiseless_{name}")
        return ("" if clean is None else f"; {clean:.3f} in the reference") + (
            "" if bare is None else f"; {bare:.3f} without noise"
        )

    yield "majority share", f"{result.majority_share:.3f}", "accuracy of always answering the most frequent class"
    note = f"mean recall of the classes{beside('balanced_accuracy')}"
    yield "balanced accuracy", f"{result.balanced_accuracy:.3f}", note
    if result.auc is not None:
        yield "AUC", f"{result.auc:.3f}", f"chance that class 1 scores above class 0{beside('auc')}"
    if result.confusion is not None and len(result.confusion) == 2:
        yield "confusion", "", imbalance.mistakes(result.confusion)


def _targets(result: Result, proportion: Mapping[str, Any]) -> Iterator[Row]:
    """The class that suffers most, and how far a trigger works. Older results have neither."""
    if worst := worst_class(result.recall, proportion.get("reference_recall")):
        beside = "" if worst.beside is None else f"; {worst.beside:.3f} in the reference"
        yield "worst class recall", f"{worst.recall:.3f}", f"share of class {worst.label} that is recognized{beside}"
    if result.attack_success is not None:
        clean, averaged = (proportion.get(f"{word}_attack_success") for word in ("reference", "undefended"))
        beside = "" if clean is None else f"; {clean:.1%} in the reference"
        beside += "" if averaged is None else f", {averaged:.1%} undefended"
        yield "attack success", f"{result.attack_success:.1%}", f"of other classes called the target{beside}"


def _uploads(result: Result) -> Iterator[Row]:
    """What became of the uploads."""
    if result.rounds_lost:
        yield "rounds lost", f"{result.rounds_lost}", "with a process that ended; paid for, never drawn again"
    yield "honest uploads refused", f"{result.honest_rejected:.1%}", "by a test, although honest"
    if result.byzantine_workers:
        yield _byzantine_weight(result)
    if result.fallback:
        yield "rounds fallen back", f"{result.fallback:.1%}", "in which the aggregator used a simpler rule"
    if result.spec.get("absent"):
        missing = sum(_counted(result, "missing").values())
        sent = result.rounds * (result.workers + result.byzantine_workers)
        yield "missing uploads", f"{missing / sent:.1%}", f"{missing:,} of {sent:,} did not arrive"
    if malformed := _counted(result, "malformed")["byzantine"]:
        share = malformed / (result.rounds * result.byzantine_workers)
        why = "of the Byzantine ones; a forge must give (M, d) floats, or None if needs_own"
        yield "malformed uploads", f"{share:.1%}", why


def _byzantine_weight(result: Result) -> Row:
    """How much of the model is Byzantine: by weight. Older results have the head count alone."""
    weight = result.byzantine_weight
    if weight is None:
        return "Byzantine uploads used", f"{result.byzantine_selected:.1%}", "of the uploads that made the model"
    return "Byzantine weight", f"{weight:.1%}", f"of the weight in the model, by {result.byzantine:.0%} of the workers"


def _counted(result: Result, reason: str) -> dict[str, int]:
    """How many uploads of each group were not used for this reason."""
    counts = [line["rejected"].get(reason, {}) for line in result.curve]
    return {group: sum(pair.get(group, 0) for pair in counts) for group in ("honest", "byzantine")}


def _time(result: Result) -> Row:
    pace = f"{result.rounds} rounds, {result.ms_per_round:.1f} ms each"
    return "time", f"{result.seconds:.1f} s", f"{pace}; {result.dataset}, {_model(result)} ({result.parameters:,})"


def _model(result: Result) -> str:
    return f"{result.features} features, {result.model_name}" if result.features else result.model_name


def spread(values: Iterable[float]) -> dict[str, float]:
    """The mean and the range of some numbers; nothing if there is none."""
    known = list(values)
    return {"mean": fmean(known), "min": min(known), "max": max(known)} if known else {}


def show_costs(found: Sequence[Bill], console: Console) -> None:
    """Print what all runs of a command cost together: a sentence for each data set."""
    for bill in found:
        console.print(bill.sentence(), soft_wrap=True, highlight=False)


def _promise(result: Result, cost: Bill, priced: bool = False) -> Iterator[Row]:
    """What the run promises each example, and what all runs of the command cost it together.

    priced: whether the price of privacy is asked for.
    """
    if result.epsilon is None:
        yield "epsilon", "none", "sigma 0: nothing is private"
    else:
        by = "stated, not checked here" if result.accountant == STATED else result.accountant.upper()
        relation = IN_WORDS[result.spec["sampling"]]
        yield (
            "epsilon",
            rounded(result.epsilon, 3),
            f"delta {result.delta:.2g}, sigma {result.sigma:.3f}, {by}; {relation}",
        )
        if priced:
            yield "  delta", f"{result.delta:.2g}", what_delta_means(result.delta, result.declared)
        if result.epsilon_at_1e_5 is not None and result.delta != COMMON_DELTA:
            yield "  at delta 1e-5", rounded(result.epsilon_at_1e_5, 3), "epsilon of the same noise"
        if result.mu is not None:
            yield "  mu", rounded(result.mu, 3), "at least as private as mu-GDP at every delta of 1e-10 or more"
    if cost.epsilon is None:
        yield "  together", "none", f"{cost.trainings} trained on this data: {cost.note}"
    elif cost.trainings > 1 or cost.epsilon != result.epsilon:
        runs = (
            "all its copies" if cost.trainings == 1 else f"all {cost.trainings} trainings of this command on this data"
        )
        all_of = f"what an example pays for {runs}"
        yield "  together", rounded(cost.epsilon, 3), f"{all_of}, at delta {cost.delta:.2g}"


def _assumption(result: Result) -> str:
    """Why an aggregator assumes so many Byzantine workers."""
    aggregator = Spec(**result.spec).build_aggregator()
    if aggregator.chosen() is not None:
        why = "as set"
    elif result.believed_byzantine == aggregator.most(result.workers + result.byzantine_workers):
        why = "as many as it admits"
    elif result.spec["gamma"] is not None:
        why = "as gamma says"
    else:
        why = "as many as there are"
    return f"{why}; it needs {aggregator.condition()}"
