"""What a run promises to every honest worker, and the noise that keeps it."""

from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from noisegate import privacy
from noisegate.errors import PrivacyError, SpecError
from noisegate.runs.spec import Spec
from noisegate.sampling import Sampling
from noisegate.roles import Worker

BASE_EPSILON = 2.0
"""The budget whose noise the base rate is tuned for (the paper's one-dimensional tuning)."""

MECHANISMS = ("gaussian", "signs")

NOT_PRIVATE = "none"
"""The accountant's name where there is no noise, and so no epsilon."""

STATED = "stated"
"""The accountant's name where epsilon was given with sigma and could not be checked for want of dp-accounting."""


@dataclass(frozen=True)
class Roster:
    """What is public of the workers: sizes (of the honest ones; public under `fixed` sampling only), declared size,
    rounds, and how many signs each flips in a round (0 for Gaussian noise)."""

    sizes: list[int]
    declared: int
    rounds: int
    signs: int = 0


@dataclass(frozen=True)
class Privacy:
    """The noise of a run and what it promises: epsilon is the largest of `worker_epsilons`, the honest workers' own.

    Without noise nothing is promised: epsilon is None. relation: what neighbors differ in. declared, sampling_rate: the
    public number of examples and the chance of each to be in a batch. epsilon_at_1e_5, mu: other forms of the promise.
    copies: how many workers that keep the promise may hold the same example; epsilon_with_copies: what it costs then.
    """

    sigma: float
    sigma_base: float
    epsilon: float | None
    delta: float
    accountant: str
    worker_epsilons: tuple[float, ...]
    relation: str
    declared: int
    sampling_rate: float
    epsilon_at_1e_5: float | None = None
    mu: float | None = None
    copies: int = 1
    epsilon_with_copies: float | None = None
    asked: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """What the accountant was asked, for every distinct size."""

    def with_copies(self, copies: int) -> "Privacy":
        """What an example costs that several workers hold: each of them spends it anew."""
        if self.epsilon is None or self.accountant == STATED or copies == 1:
            return replace(self, copies=copies, epsilon_with_copies=None if copies > 1 else self.epsilon)
        asked = {key: value for key, value in self.asked.items() if key != "sizes"}
        asked["rounds"] *= copies
        spent = max(privacy.epsilon(self.sigma, examples=size, **asked) for size in self.asked["sizes"])
        return replace(self, copies=copies, epsilon_with_copies=spent)


def make_promise(spec: Spec, sampling: Sampling, roster: Roster) -> Privacy:
    """Calibrate, or check the noise that was given. Never less noise than the budget needs, never a guess."""
    priced = sampling.priced(roster.sizes, roster.declared)
    delta = privacy.delta_of(spec.delta, max(priced))
    asked: dict[str, Any] = {
        "rounds": roster.rounds,
        "sampling": sampling,
        "delta": delta,
        "accountant": spec.accountant,
        "signs": roster.signs,
    }
    public = sampling.relation, roster.declared, sampling.rate(min(priced))  # of the smallest worker, if they differ
    if spec.sigma == 0:
        if roster.signs:
            raise SpecError("sigma = 0.0: a worker that flips signs needs noise; choose another worker")
        return Privacy(0.0, spec.sigma_base or 0.0, None, delta, NOT_PRIVATE, (), *public)
    if spec.sigma is None:
        budget = spec.epsilon or BASE_EPSILON
        sigma, own = privacy.worst_sigma(budget, priced, **asked)
    elif spec.epsilon is not None and find_spec("dp_accounting") is None:
        privacy.ask_of(min(priced), **asked)  # what has no price cannot be stated either
        base = spec.sigma_base or _need("sigma_base")
        return Privacy(spec.sigma, base, spec.epsilon, delta, STATED, (spec.epsilon,) * len(priced), *public)
    else:
        sigma = spec.sigma
        own = {size: privacy.epsilon(sigma, examples=size, **asked) for size in set(priced)}
        if spec.epsilon is not None and max(own.values()) > spec.epsilon:
            raise PrivacyError(
                f"sigma = {sigma:g}: spends epsilon {max(own.values()):.4f}, more than the {spec.epsilon:g} asked for; "
                "leave sigma out to have it calibrated"
            )
    base = spec.sigma_base or privacy.worst_sigma(BASE_EPSILON, priced, **asked)[0]
    epsilons = tuple(own[size] for size in priced)
    promise = Privacy(sigma, base, max(epsilons), delta, spec.accountant, epsilons, *public)
    worst = max(own, key=lambda size: own[size])
    said = privacy.statement(privacy.ask_of(worst, **asked), sigma)
    asked["sizes"] = sorted(own)
    return replace(promise, epsilon_at_1e_5=said.epsilon_at_1e_5, mu=said.mu, asked=asked)


def signs_of(worker: Worker, d: int) -> int:
    """How many signs a worker flips in a round; 0 if it adds Gaussian noise. What else it does has no known price."""
    if worker.mechanism not in MECHANISMS:
        raise SpecError(
            f"worker: its mechanism is {worker.mechanism!r}, which cannot be priced; it must be one of "
            f"{', '.join(map(repr, MECHANISMS))}"
        )
    return d if worker.mechanism == "signs" else 0


def _need(name: str) -> float:
    raise SpecError(f"{name}: dp-accounting is not installed here, so {name} must be given beside sigma and epsilon")
