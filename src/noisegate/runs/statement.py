"""The privacy statement as text, for whoever has to sign it."""

from collections.abc import Mapping
from textwrap import fill
from typing import Any

from noisegate.sampling import BALANCED

WIDTH, COMMON_DELTA = 100, 1e-5
"""The width of the text in characters, and the delta that epsilon is also given for."""

NOT_COVERED = (
    "Several examples of one person. The statement protects one example at a time. Who has several at one worker is "
    "protected less, as the numbers for groups say; who has some at several workers pays at each of them.",
    "Anything else that was trained, tuned or measured on the same data and given away: the losses add up.",
    "The server's own examples, which are taken to be public, and what is public: the declared number, and the shares "
    "of the classes where their rates follow from them.",
    "The weights that training began with, and what of the model was not trained (frozen parameters and buffers): they "
    "are taken to be public. So is which classes there are.",
    "Workers that did not follow the protocol.",
    "What the model shows about people in general. It may be true of a person who is not in the data at all.",
    "The machines: who could read their memory or measure their time while they trained is not kept out.",
    "Every other file of the run folder: the curve and the verdicts, the accuracy, the spec with its seed, the "
    "checkpoints, the reports.",
)


def as_text(said: Mapping[str, Any]) -> str:
    """The content of privacy.txt. said: the content of privacy.json."""
    paragraphs = [
        "PRIVACY STATEMENT",
        f"For the model in model.safetensors (sha256 {said['model']['sha256']}), "
        f"{said['model']['parameters']:,} numbers, trained with noisegate {said['noisegate']}.",
        "What is promised",
        f"The model was trained with differential privacy. Unit: {said['unit']}. Two collections of data are compared "
        f"that differ in one such example; relation: {said['relation_in_words']}. Whatever somebody does with the "
        "model, any conclusion is at most e^epsilon times as likely with the example as without it, and the other way "
        "around, but for a probability of delta.",
        *_numbers(said),
        "How it was done",
        f"Workers sample by a public number of examples, {said['declared']:,}. {_declared(said)} In every round each "
        f"example was drawn with a rate of {_rate(said)} ({said['sampling']} sampling), and before anything left the "
        f"worker {_mechanism(said)}. Rounds: {said['rounds']:,}{_lost(said)}. Accountant: {said['accountant']}. "
        f"Randomness: {said['randomness']}.",
        f"The server used {said['server_examples']['per_class']} examples of each class from "
        f"{said['server_examples']['from']}. These have no protection.",
        *_floating(said),
        *_beside(said),
        "What is not covered",
        *(f"* {line}" for line in NOT_COVERED),
        "What may be given away",
        "These three files, and no others: model.safetensors, privacy.json, privacy.txt. The statement does not hold "
        "for any other file of the run folder that they come from.",
    ]
    return (
        "\n\n".join(fill(one, WIDTH, subsequent_indent="  " if one.startswith("* ") else "") for one in paragraphs)
        + "\n"
    )


def _declared(said: Mapping[str, Any]) -> str:
    if said["declared_from"] == "the spec":
        return "It was declared before the run."
    return (
        "It was not declared beforehand but taken from the data, as the workers' mean. It and the workers' sizes, by "
        "which the server may have judged, count as public."
    )


def _rate(said: Mapping[str, Any]) -> str:
    most = "at most " if said["sampling"] in ("fixed", BALANCED) else ""
    rates = said.get("class_rates")
    own = (
        f", by its class {', '.join(f'{rate:.6g}' for rate in rates)}, from public shares of the classes"
        if rates
        else ""
    )
    return f"{most}{said['sampling_rate']:.6g}{own}"


def _lost(said: Mapping[str, Any]) -> str:
    lost = said["rounds_lost"]
    return f", of which {lost:,} were lost with a process that ended; they are paid for" if lost else ""


def _mechanism(said: Mapping[str, Any]) -> str:
    if said["mechanism"] == "signs":
        return f"each sign of what it sends was flipped at random (noise multiplier {said['sigma']:.6g})"
    kind = "Gaussian noise" if said["mechanism"] == "gaussian" else f"noise ({said['mechanism']})"
    return (
        f"the sum got {kind} with a standard deviation of {said['noise_over_change']:.6g} times what one example can "
        "change, in float64, rounded to a public grid"
    )


def _floating(said: Mapping[str, Any]) -> list[str]:
    more = said["floating_point"]
    if more is None:
        return []
    return [
        "These numbers are for real numbers. That machines have none can add at most "
        f"{_up(more['epsilon'])} to epsilon and {_up(more['delta'])} to delta."
    ]


def _numbers(said: Mapping[str, Any]) -> list[str]:
    lines = [f"* epsilon = {_up(said['epsilon'])} at delta = {_up(said['delta'])}"]
    if said["delta"] != COMMON_DELTA:
        lines.append(f"* epsilon = {_up(said['epsilon_at_1e_5'])} at delta = 1e-05")
    lines.append(
        f"* as Gaussian differential privacy: mu = {_up(said['mu'])}. The model shows at most as much as one look at a "
        "sum through Gaussian noise of 1 / mu times what one example can change, for every delta of 1e-10 or more"
    )
    lines += [
        f"* for {k} examples of one worker together: epsilon = {_up(spent)} at the same delta"
        for k, spent in said["groups"].items()
    ]
    return lines


def _up(value: float) -> str:
    """A number with four digits, rounded up."""
    text = f"{value:.4g}"
    return text if float(text) >= value else f"{value + 10.0 ** (_exponent(value) - 3) / 2:.4g}"


def _exponent(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])


def _beside(said: Mapping[str, Any]) -> list[str]:
    """The paragraph on other runs on the same data."""
    if not said["trained_beside"]:
        return [
            "The folder of this run holds no other training on the same data. Other folders, those of a sweep among "
            "them, were not looked at."
        ]
    told = [
        f"{one['run']} ("
        + (
            f"epsilon {_up(one['epsilon'])} at delta {_up(one['delta'])}"
            if one["epsilon"] is not None
            else "no price known"
        )
        + ")"
        for one in said["trained_beside"]
    ]
    words = (
        f"The same command also trained on the same data: {', '.join(told)}. These models are not given away here. As "
        "soon as anything of them is, their accuracies included, the losses add up"
    )
    together = said["together"]
    end = (
        f": all together at most epsilon {_up(together['epsilon'])} at delta {_up(together['delta'])}."
        if together
        else "."
    )
    return [words + end]
