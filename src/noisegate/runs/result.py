"""What a run found: one record, in Python and in result.json."""

import copy
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from noisegate import metrics
from noisegate.checks import plain
from noisegate.data import Dataset
from noisegate.errors import SpecError, StoreError
from noisegate.features import Features
from noisegate.roles import trigger_of
from noisegate.runs.dealing import is_given
from noisegate.runs.measures import measured
from noisegate.runs.pictures import curve_figure
from noisegate.runs.setup import Setup
from noisegate.runs.spec import Spec
from noisegate.runs.store import RunFolder
from noisegate.runs.tables import curve_rows, frame_of, result_html, result_lines
from noisegate.runs.trained import StoredModel, TrainedModel
from noisegate.runs.wellformed import check_result, fields_of
from noisegate.sampling import Balanced
from noisegate.simulate import Exam, Federation, Progress, attack_success, shares

JSON_NAMES = {"model_name": "model"}
"""What a field is called in result.json, where that differs: `model` was a name before it was a module."""


@dataclass(frozen=True)
class Result:
    """What a run found. Everything but `seconds` and `ms_per_round` is the same whenever the spec is.

    accuracy: of the last round; best_accuracy is the best of the evaluated ones, beside it and never instead of it.
    honest_rejected: share of the honest uploads that arrived which a test refused. byzantine_weight: the weight that
    Byzantine uploads had in the model, of that of all uploads; byzantine_selected: their share of the uploads used, by
    head count. missing: share of the uploads that did not arrive. Results of earlier versions have neither weight nor
    missing uploads. epsilon: the largest of the honest workers' own (worker_epsilons, by position), None without any
    noise; accountant is "stated" if it could not be checked. believed_byzantine: how many Byzantine workers the
    aggregator reckons with, if it asks. seconds: of all rounds, without pauses. recall: of each class after the last
    round, None for a class without test examples. attack_success: share of the test examples of other classes that the
    last model calls the attack's target once they carry its trigger; None for an attack without a trigger. fallback:
    share of the rounds in which the aggregator fell back. features: what examples were turned into; empty if nothing.
    parameters: how many were trained. frozen: how many numbers of the model were not, its buffers included.

    Of the last model, for classes that are uneven: balanced_accuracy, the mean recall of the classes; majority_share,
    the accuracy of whoever always answers the most frequent class; confusion, how many test examples of the class of a
    row are called by that of a column (None beyond 100 classes); auc, the chance that an example of class 1 has more of
    its score than one of class 0, None unless there are two. metrics: those that were asked for, by name; None for one
    that is no finite number. worker_accuracy: on the test examples of each honest worker's own, by its name or number,
    None for one without any; None where the data do not say whose they are. Earlier versions have none of these.

    class_shares, class_rates: with balanced sampling the public share of each class, and the rate at which its
    examples are drawn; sampling_rate is the highest of these, which is priced. None with any other sampling.
    model_name: of the module (`model` in result.json). input_shape: of what it takes of one example; classes: how many
    there are; feature_names: the columns of a table. Results of earlier versions have none of these.
    """

    accuracy: float
    best_accuracy: float
    curve: list[dict[str, Any]]
    epsilon: float | None
    delta: float
    sigma: float
    rounds: int
    workers: int
    byzantine: float
    byzantine_workers: int
    attack: str
    aggregator: str
    believed_byzantine: int | None
    dataset: str
    model_name: str
    parameters: int
    seed: int
    honest_rejected: float
    byzantine_selected: float
    accountant: str
    worker_epsilons: list[float]
    relation: str
    declared: int
    sampling_rate: float
    epsilon_at_1e_5: float | None
    mu: float | None
    copies: int
    epsilon_with_copies: float | None
    secret: bool
    rounds_lost: int
    spec: dict[str, Any]
    seconds: float
    ms_per_round: float
    byzantine_weight: float | None = None
    missing: float = 0.0
    recall: list[float | None] | None = None
    attack_success: float | None = None
    fallback: float = 0.0
    features: str = ""
    balanced_accuracy: float | None = None
    majority_share: float | None = None
    confusion: list[list[int]] | None = None
    auc: float | None = None
    metrics: dict[str, float | None] | None = None
    worker_accuracy: dict[str, float | None] | None = None
    input_shape: list[int] | None = None
    classes: int | None = None
    frozen: int = 0
    class_shares: list[float] | None = None
    class_rates: list[float] | None = None
    feature_names: list[str] | None = None
    _trained: TrainedModel | StoredModel | None = field(default=None, repr=False, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, ready for JSON. What `model_name` says is called `model` there."""
        names = [each.name for each in fields(self) if not each.name.startswith("_")]
        return {JSON_NAMES.get(name, name): copy.deepcopy(getattr(self, name)) for name in names}

    @property
    def model(self) -> nn.Module:
        """The trained module, in evaluation mode and on the CPU: a copy, which may be changed.

        Of a run with features it takes features; `predict` takes examples.
        """
        return self._model().module()

    def predict(self, x: Any) -> Tensor:
        """The class that the trained model gives each of the examples `x`, (N, ...): (N,) whole numbers.

        x: a tensor, an array or a frame, as for `Dataset`. With features they are turned into these first. Of a frame
        the columns are taken that it was trained on, by their names.
        """
        shape = None if self.input_shape is None else tuple(self.input_shape)
        return self._model().predict(x, shape, tuple(self.feature_names or ()))

    def plot(self) -> Any:
        """The accuracy over the rounds, as a plotly figure."""
        return curve_figure({f"{self.aggregator} against {self.attack}": self.as_dict()})

    def to_frame(self) -> Any:
        """The curve as a pandas frame: a row for each evaluated round, with the uploads used and refused since."""
        return frame_of(curve_rows(self.curve), "Result.to_frame", "Result.curve")

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return result_html(result_lines(self.as_dict()))

    def __getstate__(self) -> dict[str, Any]:
        """All but the module, which another process may not be able to hold: load the run's folder there."""
        return {**vars(self), "_trained": None}

    def _model(self) -> TrainedModel:
        if self._trained is None:
            raise SpecError(
                "model: this result has none, since it was copied from another process; give the run a folder with "
                "out=, and load that: noisegate.load(folder)"
            )
        return self._trained if isinstance(self._trained, TrainedModel) else self._trained.read(self)


def summarize(spec: Spec, setup: Setup, progress: Progress) -> Result:
    """What a run found that is over."""
    federation, promise = setup.federation, setup.privacy
    found = shares(federation, progress)
    curve = list(progress.curve)
    examined = federation.mechanism.model, progress.state.params, setup.x_test, setup.y_test
    exam = setup.examine(progress.state.params)
    trigger = trigger_of(federation.adversary.attack)
    result = Result(
        accuracy=curve[-1]["accuracy"],
        best_accuracy=max(line["accuracy"] for line in curve),
        curve=curve,
        epsilon=promise.epsilon,
        delta=promise.delta,
        sigma=promise.sigma,
        rounds=federation.schedule.rounds,
        workers=_count(~federation.adversary.byzantine),
        byzantine=_count(federation.adversary.byzantine) / len(federation.adversary.byzantine),
        byzantine_workers=_count(federation.adversary.byzantine),
        attack=spec.canonical()["attack"]["name"],
        aggregator=spec.canonical()["aggregator"]["name"],
        believed_byzantine=believed_byzantine(federation),
        dataset=setup.dataset,
        model_name=setup.model,
        parameters=federation.mechanism.model.d,
        seed=spec.seed,
        honest_rejected=found.honest_rejected,
        byzantine_selected=found.byzantine_selected,
        byzantine_weight=found.byzantine_weight,
        missing=found.missing,
        fallback=found.fallback,
        features=setup.features,
        **_class_draws(federation),
        frozen=sum(value.numel() for value in federation.mechanism.model.kept().values()),
        **_by_class(exam),
        worker_accuracy=_by_worker(exam, setup.given[0]) if is_given(spec, setup.given[0]) else None,
        attack_success=attack_success(*examined, trigger) if trigger else None,
        accountant=promise.accountant,
        worker_epsilons=list(promise.worker_epsilons),
        relation=promise.relation,
        declared=promise.declared,
        sampling_rate=promise.sampling_rate,
        epsilon_at_1e_5=promise.epsilon_at_1e_5,
        mu=promise.mu,
        copies=promise.copies,
        epsilon_with_copies=promise.epsilon_with_copies,
        secret=spec.secret,
        rounds_lost=progress.lost,
        spec=spec.canonical(),
        seconds=progress.seconds,
        ms_per_round=1e3 * progress.seconds / federation.schedule.rounds,
        input_shape=list(setup.x_test.shape[1:]),
        classes=federation.adversary.classes,
        feature_names=list(setup.given[0].feature_names) or None,
        _trained=TrainedModel(examined[0], progress.state.params.cpu().clone(), setup.make),
    )
    return replace(result, metrics=measured(setup.metrics, exam, vars(result)))


def _class_draws(federation: Federation) -> dict[str, Any]:
    """The public share of every class and its rate, where classes have rates of their own."""
    mechanism = federation.mechanism
    if not isinstance(mechanism.sampling, Balanced):
        return {}
    sampling = mechanism.sampling
    return {"class_shares": list(sampling.shares), "class_rates": list(sampling.rates(mechanism.declared))}


def _by_class(exam: Exam) -> dict[str, Any]:
    """What the last model tells of each class."""
    confusion = exam.confusion
    recall = metrics.recall_of(confusion)
    return {
        "recall": recall,
        "balanced_accuracy": metrics.balanced_accuracy(recall),
        "majority_share": metrics.majority_share(confusion),
        "confusion": confusion.tolist() if len(confusion) <= metrics.MOST_CLASSES else None,
        "auc": metrics.auc(exam.scores, exam.y),
    }


def _by_worker(exam: Exam, dataset: Dataset) -> dict[str, float | None] | None:
    """The accuracy on the test examples of each worker's own; None where the data do not say whose they are."""
    if dataset.owner is None or dataset.owner_test is None:
        return None
    right, owner = exam.called == exam.y, dataset.owner_test
    names = dataset.worker_names
    found = {worker: right[owner == worker].double() for worker in dataset.owner.unique().tolist()}
    return {
        names[worker] if names else str(worker): float(own.mean()) if len(own) else None
        for worker, own in found.items()
    }


def stored(
    found: dict[str, Any], folder: RunFolder, module: nn.Module | None = None, features: Features | None = None
) -> Result:
    """The result that a folder holds, of which every field is checked. module, features: your own, if it had any."""
    where = f"{plain(folder.path)}: its result.json"
    names = {said: name for name, said in JSON_NAMES.items()}
    known = {names.get(key, key): value for key, value in found.items() if not key.startswith("_")}
    try:
        values = fields_of(Result, known, where)
        check_result(values, where)
    except StoreError as error:
        raise StoreError(f"{error}; remove it, or run without --resume, to start afresh") from None
    return Result(**values, _trained=StoredModel(folder.path, module, features))


def load(folder: Path | str, *, model: nn.Module | None = None, features: Features | None = None) -> Result:
    """The result of a finished run, from its folder. It runs no code; `model` and `predict` of it may.

    model, features: your own, if the run was given any beside its spec.
    """
    path = Path(folder)
    store = RunFolder(path)
    found = store.result()
    if found is None:
        why = "holds no finished run"
        if (path / "runs").is_dir():
            why = "is of a sweep; load the folders in its folder runs"
        elif (path / "spec.toml").exists():
            why = "holds a run that is not finished; go on with it: noisegate run --resume"
        raise StoreError(f"{plain(path)}: {why}")
    return stored(found, store, model, features)


def believed_byzantine(federation: Federation) -> int | None:
    """How many Byzantine workers the aggregator reckons with; None for an aggregator that does not ask."""
    return federation.server.aggregator.reckoned(len(federation.workers), federation.server.believed_honest)


def _count(mask: Tensor) -> int:
    return int(torch.count_nonzero(mask))
