"""What Byzantine workers do. A new attack is one file and one line here."""

from collections.abc import Callable
from typing import Any

from noisegate.attacks.a_little import ALittle
from noisegate.attacks.backdoor import Backdoor
from noisegate.attacks.class_hide import ClassHide
from noisegate.attacks.class_swap import ClassSwap
from noisegate.attacks.dormant import Dormant
from noisegate.attacks.fang_krum import FangKrum
from noisegate.attacks.fang_trimmed_mean import FangTrimmedMean
from noisegate.attacks.gaussian import Gaussian
from noisegate.attacks.gradient_ascent import GradientAscent
from noisegate.attacks.honest import Honest
from noisegate.attacks.inner import Inner
from noisegate.attacks.label_flip import LabelFlip
from noisegate.attacks.large_norm import LargeNorm
from noisegate.attacks.local_poisoning import LocalPoisoning
from noisegate.attacks.mimic import Mimic
from noisegate.attacks.min_max import MinMax, MinSum
from noisegate.attacks.not_a_number import NotANumber
from noisegate.attacks.on_off import OnOff
from noisegate.attacks.rank_matched import RankMatched
from noisegate.attacks.score_banking import ScoreBanking
from noisegate.attacks.sign_flip import SignFlip
from noisegate.attacks.trojan import Trojan
from noisegate.attacks.tuned import ALittleTuned, InnerTuned
from noisegate.attacks.zero import Zero

ATTACKS: dict[str, Callable[..., Any]] = {
    "none": Honest,
    "zero": Zero,
    "nan": NotANumber,
    "large-norm": LargeNorm,
    "gaussian": Gaussian,
    "label-flip": LabelFlip,
    "class-swap": ClassSwap,
    "class-hide": ClassHide,
    "backdoor": Backdoor,
    "gradient-ascent": GradientAscent,
    "sign-flip": SignFlip,
    "mimic": Mimic,
    "local-poisoning": LocalPoisoning,
    "a-little": ALittle,
    "inner": Inner,
    "min-max": MinMax,
    "min-sum": MinSum,
    "fang-krum": FangKrum,
    "fang-trimmed-mean": FangTrimmedMean,
    "a-little-tuned": ALittleTuned,
    "inner-tuned": InnerTuned,
    "rank-matched": RankMatched,
    "score-banking": ScoreBanking,
    "trojan": Trojan,
    "on-off": OnOff,
    "dormant": Dormant,
}

__all__ = [
    "ATTACKS",
    "ALittle",
    "ALittleTuned",
    "Backdoor",
    "ClassHide",
    "ClassSwap",
    "Dormant",
    "FangKrum",
    "FangTrimmedMean",
    "Gaussian",
    "GradientAscent",
    "Honest",
    "Inner",
    "InnerTuned",
    "LabelFlip",
    "LargeNorm",
    "LocalPoisoning",
    "Mimic",
    "MinMax",
    "MinSum",
    "NotANumber",
    "OnOff",
    "RankMatched",
    "ScoreBanking",
    "SignFlip",
    "Trojan",
    "Zero",
]
