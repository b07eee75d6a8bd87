"""The numbers at the top of the page of a run."""

from typing import Any

from noisegate.checks import rounded
from noisegate.report.folders import RunRecord, number
from noisegate.report.targets import balance, own_metrics, success
from noisegate.runs.promise import STATED

Entry = tuple[str, str, str]
"""What a number is, the number, and a note."""

ONE_SEED = (
    "This is one run with one seed. Another seed gives another accuracy; a sweep over seeds shows how much they differ."
)
"""The note below the summary of a run."""


def summary(record: RunRecord) -> list[Entry]:
    """Its accuracy, what it is compared with, and what the run cost."""
    result = record.result
    if result is None:
        if not record.curve:
            return [("accuracy", "–", "not evaluated yet")]
        last = record.curve[-1]
        return [("accuracy so far", f"{last['accuracy']:.3f}", f"after round {last['round']}")]
    shown = [
        ("accuracy", f"{result['accuracy']:.3f}", f"after the last round; best seen {result['best_accuracy']:.3f}")
    ]
    shown += balance(record) + own_metrics(record)
    if "reference" in record.beside:
        clean = record.beside["reference"]["accuracy"]
        shown.append(("reference accuracy", f"{clean:.3f}", "same private training, honest workers only, plain mean"))
    if "undefended" in record.beside:
        bare = record.beside["undefended"]["accuracy"]
        shown.append(("undefended", f"{bare:.3f}", "plain mean under the same attack"))
    if "noiseless" in record.beside:
        bare = record.beside["noiseless"]["accuracy"]
        shown.append(("without noise", f"{bare:.3f}", "no privacy, no attackers, plain mean, at the base rate"))
    by = "stated, not checked" if result.get("accountant") == STATED else str(result.get("accountant", "?")).upper()
    if result["sigma"] == 0:
        shown.append(("epsilon", "none", "sigma is 0: nothing is private"))
    else:
        shown.append(("epsilon", rounded(result["epsilon"], 3), f"delta {result['delta']:.2g}, {by}"))
    shown += success(record) + _uploads(result)
    if number(result.get("seconds")) and number(result.get("ms_per_round")):
        shown.append(("time", f"{result['seconds']:.1f} s", f"{result['ms_per_round']:.1f} ms a round"))
    return shown


def _uploads(result: dict[str, Any]) -> list[Entry]:
    """What became of the uploads. The results of earlier versions have no weight, only the head count."""
    shown = []
    if number(result.get("honest_rejected")):
        shown.append(("honest uploads refused", f"{result['honest_rejected']:.1%}", "by a test, although honest"))
    used = f"{result['byzantine_selected']:.1%}" if number(result.get("byzantine_selected")) else "–"
    if number(result.get("byzantine_weight")):
        note = f"of the model's updates; {used} of the uploads used, by head count"
        shown.append(("weight of Byzantine uploads", f"{result['byzantine_weight']:.1%}", note))
    elif used != "–":
        shown.append(("Byzantine uploads used", used, "of the uploads used, by head count"))
    if number(result.get("missing")) and result["missing"] > 0:
        shown.append(("uploads missing", f"{result['missing']:.1%}", "did not arrive, which accuses nobody"))
    return shown
