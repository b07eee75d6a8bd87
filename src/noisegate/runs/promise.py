"""The privacy that a run promises to every honest worker, and the noise that it needs for that."""

import warnings
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from noisegate import privacy
from noisegate.errors import NoisegateWarning, PrivacyError, SpecError
from noisegate.roles import Worker
from noisegate.runs.spec import Spec
from noisegate.sampling import Sampling

BASE_EPSILON = 2.0
"""The epsilon whose noise the base rate is tuned for (the paper's one-dimensional tuning)."""

MECHANISMS = ("gaussian", "signs")
"""The mechanisms of workers that can be priced."""

NOT_PRIVATE = "none"
"""The name of the accountant in a result without noise, and so without epsilon."""

STATED = "stated"
"""The name of the accountant where epsilon was given with sigma, and dp-accounting is not installed to check it."""


@dataclass(frozen=True)
class PricedWorkers:
    """What the accountant needs to know of the workers.

    sizes: the honest workers' numbers of examples, as they claim them. declared: the declared size. signs: how many
    signs each worker flips in a round; 0 for Gaussian noise.
    """

    sizes: list[int]
    declared: int
    rounds: int
    signs: int = 0


@dataclass(frozen=True)
class Privacy:
    """The noise of a run and the privacy that it gives.

    worker_epsilons: the honest workers' own. epsilon: the largest of them; None without noise. relation: what
    neighboring data sets differ in. declared: the declared size. sampling_rate: the probability of each example to be
    in a batch. epsilon_at_1e_5, mu: other forms of the same privacy. copies: how many workers that follow the protocol
    hold the same example, at most. epsilon_with_copies: what such an example costs.
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
    """What the accountant was asked, and `sizes`, the distinct sizes that it was asked for."""

    def with_copies(self, copies: int) -> "Privacy":
        """The same with the cost of an example that `copies` workers hold: each of them spends epsilon on it."""
        if self.epsilon is None or self.accountant == STATED or copies == 1:
            return replace(self, copies=copies, epsilon_with_copies=None if copies > 1 else self.epsilon)
        asked = {key: value for key, value in self.asked.items() if key != "sizes"}
        asked["rounds"] *= copies
        spent = max(privacy.epsilon(self.sigma, examples=size, **asked) for size in self.asked["sizes"])
        return replace(self, copies=copies, epsilon_with_copies=spent)


def make_promise(spec: Spec, sampling: Sampling, workers: PricedWorkers) -> Privacy:
    """The privacy of a run: the noise is calibrated to the spec's epsilon, or the given noise is checked against it."""
    priced = sampling.priced(workers.sizes, workers.declared)
    delta = delta_for(spec, max(priced), workers)
    asked: dict[str, Any] = {
        "rounds": workers.rounds,
        "sampling": sampling,
        "delta": delta,
        "accountant": spec.accountant,
        "signs": workers.signs,
    }
    public = sampling.relation, workers.declared, sampling.rate(min(priced))  # the rate of the smallest worker
    if spec.sigma == 0:
        if workers.signs:
            raise SpecError("sigma = 0.0: a worker that flips signs needs noise; choose another worker")
        return Privacy(0.0, spec.sigma_base or 0.0, None, delta, NOT_PRIVATE, (), *public)
    if spec.sigma is None:
        budget = spec.epsilon or BASE_EPSILON
        sigma, own = privacy.worst_sigma(budget, priced, **asked)
    elif spec.epsilon is not None and find_spec("dp_accounting") is None:
        privacy.ask_of(min(priced), **asked)  # raises if it cannot be priced
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


def sizes_are_public(spec: Spec) -> bool:
    """Whether the sizes that workers hold count as public, as `declared` does where it is made of them.

    In a secret run with a declared number they do not: nothing that leaves follows any worker's true number.
    """
    return not spec.secret or spec.declared is None


def delta_for(spec: Spec, priced: int, workers: PricedWorkers) -> float:
    """The one delta of all workers. priced: the largest number of examples that a price is for.

    Unless given it is at most a tenth of 1 / |D_i| for every worker, the largest too; a declared number that is given
    stands for all sizes. `paper` is that of the declared size (of the largest worker, where each has a price of its
    own), so that a small worker does not get the large delta of its own size. NoisegateWarning where delta is above
    1 / |D_i|: then handing out one example in full would keep the promise.
    """
    largest = max(workers.sizes)
    uneven = largest - min(workers.sizes) > 1  # even ones differ by what was left over
    by_sizes = spec.delta is None and spec.declared is None and uneven
    delta = privacy.delta_of(spec.delta, max(priced, largest) if by_sizes else priced)
    exposed = [size for size in workers.sizes if delta * size > 1]
    if exposed and spec.sigma != 0:
        text = (
            f"delta = {delta:.3g}: is above 1 / |D| for {len(exposed)} of {len(workers.sizes)} workers, of whom the "
            f"largest holds {largest} examples; it permits to hand out an example of theirs; give a delta below "
            f"{1 / largest:.2g}"
        )
        warnings.warn(text, NoisegateWarning, stacklevel=3)
    return delta


def signs_of(worker: Worker, d: int) -> int:
    """How many signs a worker flips in a round; 0 if it adds Gaussian noise. SpecError for any other mechanism."""
    if worker.mechanism not in MECHANISMS:
        raise SpecError(
            f"worker: its mechanism is {worker.mechanism!r}, which cannot be priced; it must be one of "
            f"{', '.join(map(repr, MECHANISMS))}"
        )
    return d if worker.mechanism == "signs" else 0


def _need(name: str) -> float:
    raise SpecError(f"{name}: dp-accounting is not installed here, so {name} must be given beside sigma and epsilon")
