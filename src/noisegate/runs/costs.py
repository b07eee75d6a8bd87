"""What all runs of a command cost one example together, for each data set.

The epsilon of a result is that of one run. Whoever sees several runs on the same data learns more. An example that is
the server's in one of the runs, or in its test set, is public there, and no sum covers it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from noisegate import privacy
from noisegate.checks import rounded
from noisegate.data import own_path
from noisegate.errors import PrivacyError
from noisegate.privacy import Cost
from noisegate.runs.setup import Setup
from noisegate.runs.spec import Spec, make_spec
from noisegate.sampling import BALANCED


@dataclass(frozen=True)
class PricedRun:
    """One run and what it costs. data: the name of its data.

    epsilon: of this run alone, at `delta`; None without noise.
    """

    data: str
    cost: Cost
    epsilon: float | None
    delta: float


@dataclass(frozen=True)
class Bill:
    """What `trainings` runs on the same data cost together. epsilon: None if there is no bound; `note` says why.

    broken: further runs that failed, and may have spent budget before they did.
    """

    data: str
    trainings: int
    epsilon: float | None
    delta: float
    note: str = ""
    broken: int = 0

    def sentence(self) -> str:
        """The bill as one sentence."""
        runs = "1 training" if self.trainings == 1 else f"{self.trainings} trainings"
        more = f"; {self.broken} more that failed may have spent up to a whole run each" if self.broken else ""
        if self.epsilon is None:
            return f"privacy: {runs} on {self.data} have no epsilon together: {self.note}{more}"
        spent = f"epsilon {rounded(self.epsilon, 3)} together, at delta {self.delta:.2g}"
        return f"privacy: {runs} on {self.data} cost an example {spent}{more}"


def training_of(result: Mapping[str, Any]) -> PricedRun:
    """What the run of a result costs, from the fields of the result."""
    spec = make_spec(result["spec"], "result")
    cost = Cost(
        declared=_declared(spec, result["sampling_rate"]),  # under `fixed` that of the smallest, who pays most
        batch=spec.batch,
        sampling=spec.sampling,
        sigma=result["sigma"],
        rounds=result["rounds"],
        signs=result["parameters"] if spec.build_worker().mechanism == "signs" else 0,
        times=result["copies"],
    )
    return PricedRun(data_of(spec), cost, result["epsilon"], result["delta"])


def _declared(spec: Spec, rate: float) -> int:
    """The number of examples that a rate is made of. A class's may be of no whole number: of fewer, which cost more."""
    exact = spec.batch / rate
    return math.floor(exact + 1e-9) if spec.sampling == BALANCED else round(exact)


def terms_of(spec: Spec, setup: Setup) -> PricedRun:
    """What a run that is ready to start will cost."""
    federation, promise = setup.federation, setup.privacy
    fields = {
        "sampling_rate": promise.sampling_rate,
        "copies": promise.copies,
        "parameters": federation.mechanism.model.d,
        "rounds": federation.schedule.rounds,
        "sigma": promise.sigma,
        "epsilon": promise.epsilon,
        "delta": promise.delta,
    }
    return training_of({**fields, "spec": spec.canonical()})


def without_copies(training: PricedRun) -> PricedRun:
    """What the run costs where no two workers that follow the protocol hold the same example."""
    return replace(training, cost=replace(training.cost, times=1))


def data_of(spec: Spec) -> str:
    """The name of a run's data; of a user's own data the path."""
    path = own_path(spec.dataset)
    return str(path.resolve()) if path else spec.dataset


def bills(trainings: Iterable[PricedRun]) -> list[Bill]:
    """What the runs cost together, for each data set, at the smallest of their deltas."""
    by_data: dict[str, list[PricedRun]] = {}
    for training in trainings:
        by_data.setdefault(training.data, []).append(training)
    return [_bill(data, some) for data, some in by_data.items()]


def _bill(data: str, some: Sequence[PricedRun]) -> Bill:
    delta = min(training.delta for training in some)
    costs = [training.cost for training in some]
    bill = Bill(data, len(some), None, delta)
    if bare := sum(cost.sigma == 0 for cost in costs):
        return replace(bill, note=f"{bare} had no noise, so no bound exists")
    if len(some) == 1 and all(cost.times == 1 for cost in costs):
        return replace(bill, epsilon=some[0].epsilon)
    try:
        spent = privacy.together(costs, delta)
    except PrivacyError as error:
        return replace(bill, note=str(error))
    if not math.isfinite(spent):
        return replace(bill, note="no bound is known at this delta")
    return replace(bill, epsilon=spent)


def as_json(found: Sequence[Bill]) -> dict[str, Any]:
    """The bills as JSON. epsilon_together: of the data set that pays most, since an example is in one data set only."""
    worst = max(found, key=lambda bill: math.inf if bill.epsilon is None else bill.epsilon, default=None)
    return {
        "trainings": sum(bill.trainings for bill in found),
        "epsilon_together": worst.epsilon if worst else None,
        "delta_together": worst.delta if worst else None,
        "together": [asdict(bill) for bill in found],
    }
