"""What Byzantine workers do. A new attack is one file and one line here."""

from collections.abc import Callable
from typing import Any

from noisegate.attacks.a_little import ALittle
from noisegate.attacks.dormant import Dormant
from noisegate.attacks.gaussian import Gaussian
from noisegate.attacks.honest import Honest
from noisegate.attacks.inner import Inner
from noisegate.attacks.label_flip import LabelFlip
from noisegate.attacks.local_poisoning import LocalPoisoning

ATTACKS: dict[str, Callable[..., Any]] = {
    "none": Honest,
    "gaussian": Gaussian,
    "label-flip": LabelFlip,
    "local-poisoning": LocalPoisoning,
    "a-little": ALittle,
    "inner": Inner,
    "dormant": Dormant,
}

__all__ = ["ATTACKS", "ALittle", "Dormant", "Gaussian", "Honest", "Inner", "LabelFlip", "LocalPoisoning"]
