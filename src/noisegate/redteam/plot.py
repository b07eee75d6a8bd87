"""Attacks and their settings in words."""

from typing import Any

from noisegate.redteam.findings import Trial
from noisegate.redteam.settings import BEHAVED

WITHOUT = "without an attack"
"""The name of the run in which Byzantine workers behave."""


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
