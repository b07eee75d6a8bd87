"""A privacy statement in words that somebody who has to sign it can read."""

from collections.abc import Mapping
from textwrap import fill
from typing import Any

FIELDS: dict[str, type] = {
    "relation": str,
    "declared": int,
    "sampling_rate": float,
    "epsilon": float,
    "delta": float,
    "epsilon_at_1e_5": float,
    "mu": float,
}
"""What a result must say, beside what every result says, before a statement can be made of it."""

WIDTH = 100

NOT_COVERED = (
    "Several examples of one person. The statement protects one example at a time. Who has k examples in the data "
    "is protected less: with k times the epsilon and a larger delta.",
    "Anything else that was trained, tuned or measured on the same data and given away: the losses add up.",
    "The server's own examples, which are taken to be public, and the declared number, which is public.",
    "The examples of workers that did not follow the protocol.",
    "What the model shows about people in general. It may be true of a person who is not in the data at all.",
    "The machines: who could read their memory or measure their time while they trained is not kept out.",
    "Every other file of the run folder: the curve and the verdicts, the accuracy, the spec with its seed, the "
    "checkpoints, the reports.",
)


def as_text(said: Mapping[str, Any]) -> str:
    """privacy.txt, from what privacy.json says."""
    paragraphs = [
        "PRIVACY STATEMENT",
        f"For the model in model.safetensors (sha256 {said['model']['sha256']}), "
        f"{said['model']['parameters']:,} numbers, trained with noisegate {said['noisegate']}.",
        "What is promised",
        f"The model was trained with differential privacy. Unit: {said['unit']}. Two collections of data are compared "
        f"that differ in one such example; relation: {said['relation']}. Whatever somebody does with the model, any "
        f"conclusion is at most e^epsilon times as likely with the example as without it, and the other way around, "
        f"but for a probability of delta.",
        *_numbers(said),
        "How it was done",
        f"Each worker declared {said['declared']:,} examples, a public number. In every round each example was drawn "
        f"with rate {said['sampling_rate']:.6g} ({said['sampling']} sampling), and before anything left the worker "
        f"{_mechanism(said)}. Rounds: {said['rounds']:,}. Accountant: {said['accountant']}. Noise: {said['noise']}. "
        "Nothing from which the noise could be drawn again was written down.",
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


def _mechanism(said: Mapping[str, Any]) -> str:
    if said["mechanism"] == "signs":
        return f"each sign of what it sends was flipped at random (noise multiplier {said['sigma']:.6g})"
    kind = "Gaussian noise" if said["mechanism"] == "gaussian" else f"noise ({said['mechanism']})"
    return f"the sum got {kind} with a standard deviation of {said['sigma']:.6g} times what one example can change"


def _numbers(said: Mapping[str, Any]) -> list[str]:
    lines = [
        f"* epsilon = {_up(said['epsilon'])} at delta = {said['delta']:.3g}",
        f"* epsilon = {_up(said['epsilon_at_1e_5'])} at delta = 1e-05",
        f"* as Gaussian differential privacy: mu = {_up(said['mu'])}",
    ]
    if said.get("epsilon_with_copies") is not None:
        lines.append(
            f"* up to {said['copies']} workers held the same example; for such an example epsilon = "
            f"{_up(said['epsilon_with_copies'])}"
        )
    return lines


def _up(value: float) -> str:
    """Four digits, never less than it is."""
    text = f"{value:.4g}"
    return text if float(text) >= value else f"{value + 10.0 ** (_exponent(value) - 3) / 2:.4g}"


def _exponent(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])


def _beside(said: Mapping[str, Any]) -> list[str]:
    """What else was trained on the same data."""
    if not said["trained_beside"]:
        return ["The folder shows no other training on the same data. Whether there was any elsewhere, it cannot show."]
    told = [
        f"{one['run']} ("
        + (
            f"epsilon {_up(one['epsilon'])} at delta {one['delta']:.3g}"
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
        f": all together at most epsilon {_up(together['epsilon'])} at delta {together['delta']:.3g}."
        if together
        else "."
    )
    return [words + end]
