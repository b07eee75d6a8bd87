"""`noisegate privacy`: how much noise a budget needs, or what a noise costs."""

import json
import warnings
from typing import Any

from noisegate import checks
from noisegate.cli.reading import read_delta, read_numbers
from noisegate.cli.records import PrivacyFlags
from noisegate.errors import NoisegateWarning, SpecError
from noisegate.flips import cost_of_sign, flip_probability
from noisegate.privacy import IN_WORDS, Guarantee, group_epsilon, guarantee
from noisegate.sampling import BALANCED, SAMPLINGS, Balanced, Sampling, settled_shares


def show_privacy(flags: PrivacyFlags) -> None:
    """Find the noise or its cost, and show it."""
    checks.one_of(SAMPLINGS, sampling=flags.sampling)
    if (flags.epsilon is None) == (flags.sigma is None):
        raise SpecError("privacy: give either --epsilon, to find the noise, or --sigma, to find its cost")
    asked: dict[str, Any] = {
        "examples": flags.samples,
        "rounds": flags.rounds,
        "sampling": _sampling(flags),
        "delta": read_delta(flags.delta),
        "accountant": flags.accountant,
        "signs": flags.signs,
    }
    found = guarantee(sigma=flags.sigma, epsilon=flags.epsilon, **asked)
    if found.delta * found.examples > 1:
        warnings.warn(
            f"delta = {found.delta:.3g}: is above 1 / {found.examples}, which permits to hand out an example; give a "
            "smaller one",
            NoisegateWarning,
            stacklevel=2,
        )
    groups = {size: group_epsilon(size, found.sigma, **asked) for size in flags.group or []}
    flips = {}
    if flags.signs:
        flips = {
            "flip_probability": flip_probability(found.sigma, flags.signs),
            "one_sign": cost_of_sign(found.sigma, flags.signs),
        }
    if flags.as_json:
        told = {"group": list(groups), "group_epsilon": list(groups.values())} if groups else {}
        print(json.dumps(found.as_dict() | flips | told, indent=2))
        return
    _show(found, groups)
    if flips:
        print(
            f"{flags.signs} signs a round, each flipped with probability {flips['flip_probability']:.4f}: one sign "
            f"costs {flips['one_sign']:.3g} a round, but one example can change all of them"
        )


def _sampling(flags: PrivacyFlags) -> Sampling:
    """The scheme that is asked for."""
    given = None if flags.class_shares is None else read_numbers("class_shares", flags.class_shares, float)
    if flags.sampling == BALANCED and given is None:
        raise SpecError(f"sampling = {BALANCED!r}: rates come from the shares of the classes; give --class-shares too")
    shares = settled_shares(given, flags.sampling, secret=False)
    return Balanced(flags.batch, tuple(shares)) if shares else SAMPLINGS[flags.sampling](flags.batch)


def in_other_ways(epsilon_at_1e_5: float | None, mu: float | None) -> str:
    """The same noise, said at a common delta and for all deltas at once."""
    common = (
        "epsilon at delta 1e-5 unknown"
        if epsilon_at_1e_5 is None
        else f"epsilon at delta 1e-5 {checks.rounded(epsilon_at_1e_5, 4)}"
    )
    if mu is None:
        return common
    least = checks.rounded(mu, 4)
    return f"{common}; at least as private as {least}-GDP (mu) for every delta of 1e-10 or more"


def what_delta_means(delta: float, examples: int) -> str:
    """How much a delta may cost a worker with so many examples."""
    return (
        f"delta is the probability that epsilon does not hold for an example: of {examples:,} examples it is at most "
        f"{delta * examples:.2g} on average"
    )


def _show(found: Guarantee, groups: dict[int, float]) -> None:
    print(f"sigma {found.sigma:.4f}   epsilon {checks.rounded(found.epsilon, 4)}   delta {found.delta:.3g}")
    print(in_other_ways(found.epsilon_at_1e_5, found.mu))
    declared = "declared" if found.sampling in ("poisson", BALANCED) else "held"
    print(
        f"{found.relation}: {IN_WORDS[found.sampling]}; over {found.rounds} rounds of {found.sampling} sampling "
        f"at rate {found.rate:.4g} ({found.batch} of {found.examples} {declared}), by {found.accountant.upper()}"
    )
    print(what_delta_means(found.delta, found.examples))
    for size, spent in groups.items():
        print(
            f"group of {size} examples of one worker, added or removed together: epsilon {checks.rounded(spent, 4)} at "
            "the same delta"
        )
