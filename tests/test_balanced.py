"""Balanced sampling: every class at a public rate of its own, of which the highest is priced. And what it does."""

import json
import math
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
import torch
from scipy.stats import binom

import noisegate
from losses import Round, normal, poisson_gaussian, worse_of_both
from noisegate import Compute, Dataset, PrivacyError, Spec, SpecError
from noisegate.audit import audit
from noisegate.deploy.trial import check_trial
from noisegate.entropy import Secret
from noisegate.examples import Holdings
from noisegate.privacy import calibrate, epsilon, group_epsilon, together
from noisegate.protocol import MOST_CLAIMED, upload_of_one
from noisegate.runs.costs import terms_of, training_of
from noisegate.runs.drawing import priced_draws
from noisegate.runs.setup import prepare
from noisegate.sampling import Balanced, Poisson
from noisegate.sampling.balanced import MOST_OFTEN
from noisegate.streams import stream

CPU = Compute(device="cpu")
SHARES = (0.9, 0.075, 0.025)
GIVEN = {"sigma": 4.0, "sigma_base": 4.0, "accountant": "rdp", "batch": 12, "rounds": 5, "byzantine": 0.0}
"""Noise that is given, where nothing is about calibration."""

DEVIATIONS = 5.0
"""Standard deviations that a count may be off: one test in a million."""


def rare(share: float = 0.05, workers: int = 20, each: int = 2000, gap: float = 2.1, seed: int = 0) -> Dataset:
    """Two clouds, of which the rarer has this share. The best possible balanced accuracy is Phi(gap / 2)."""
    rng = np.random.default_rng(seed)

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = rng.random(count) < share
        x = rng.normal(size=(count, 10)) + y[:, None] * gap / math.sqrt(10)
        return torch.tensor(x / 4, dtype=torch.float32), torch.tensor(y).long()

    (x, y), (x_test, y_test) = draw(workers * each), draw(10_000)
    return Dataset("rare", x, y, x_test, y_test, classes=2)


def labels_of(counts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(n,) sizes and (n, longest) labels of workers that hold so many of each class."""
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in counts]
    return torch.tensor([len(row) for row in rows]), torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def test_every_class_is_drawn_equally_often():
    """A slow oracle: count the draws of every class, at workers whose classes differ."""
    sampling, counts, draws = Balanced(12, SHARES), [[900, 75, 25], [100, 0, 3], [0, 40, 200]], 400
    sizes, labels = labels_of(counts)
    draw, drawn = sampling.over(sizes, 1000, labels), torch.zeros(3, 3)
    for t in range(draws):
        marks = draw(stream(1, "batch", t))
        assert not (marks & (torch.arange(marks.shape[1]) >= sizes[:, None])).any()
        for row in range(3):
            drawn[row] += labels[row][marks[row]].bincount(minlength=3)
    rates = [4 / 900, 4 / 75, 4 / 25]
    assert sampling.rates(1000) == pytest.approx(rates)
    for row in range(3):
        for label, rate in enumerate(rates):
            trials = draws * counts[row][label]
            assert abs(float(drawn[row, label]) - trials * rate) <= DEVIATIONS * (trials * rate * (1 - rate)) ** 0.5
    assert drawn[0].tolist() == pytest.approx([4 * draws] * 3, rel=0.15), "a worker like all draws as many of each"


def test_an_example_more_changes_no_others_rate():
    """The rates are made of public numbers. The neighbor without an example draws what it drew before, but for it."""
    sampling = Balanced(12, SHARES)
    more, fewer = labels_of([[90, 7, 3], [80, 20, 0]]), labels_of([[90, 7, 3], [80, 19, 0]])
    draws = [sampling.over(sizes, 100, labels) for sizes, labels in (more, fewer)]
    seen = False
    for t in range(50):
        with_it, without = (draw(stream(2, "batch", t)) for draw in draws)
        seen |= bool(with_it[1, 99])
        with_it[1, 99] = False
        assert torch.equal(with_it, without)
    assert seen


@pytest.mark.parametrize("shares", [(1.0,), (5.0, 5.0), (95.0, 5.0), (0.999, 0.001), (0.7, 0.2, 0.0, 0.1), (1, 1e-9)])
@pytest.mark.parametrize("declared", [16, 200, 3000])
def test_rates(shares, declared):
    """They are chances, no class has more than its bound, and a worker like all expects the batch."""
    sampling = Balanced(16, shares)
    rates, held = sampling.rates(declared), [declared * share / sum(shares) for share in shares]
    bound = min(1.0, MOST_OFTEN * 16 / declared)
    assert all(0 <= rate <= bound for rate in rates)
    assert sum(rate * count for rate, count in zip(rates, held, strict=True)) == pytest.approx(16)
    drawn = [rate * count for rate, count in zip(rates, held, strict=True) if count]
    free = [count for count, rate in zip(drawn, [r for r in rates if r], strict=True) if rate < bound * (1 - 1e-12)]
    assert free == pytest.approx([max(drawn)] * len(free)), "all that are below the bound are drawn equally often"
    assert sampling.rate(declared) == max(rates)
    assert sampling.largest_sum(1, declared, declared, 0.01) == Poisson(16).largest_sum(1, declared, declared, 0.01)


def test_one_class_is_poisson():
    sizes = torch.tensor([40, 300])
    same = (each.over(sizes, 200)(stream(1, "b")) for each in (Balanced(16), Poisson(16)))
    assert torch.equal(*same)
    assert Balanced(16).event(200, 1.5) == Poisson(16).event(200, 1.5)
    assert Balanced(16).as_many(200) == 200


def test_the_highest_rate_is_priced():
    event = dp_accounting.PoissonSampledDpEvent(4 / 25, dp_accounting.GaussianDpEvent(1.5))
    assert Balanced(12, SHARES).event(1000, 1.5) == event
    asked = {"rounds": 300, "delta": 1e-5}
    ours = epsilon(3.0, examples=1000, sampling=Balanced(12, SHARES), **asked)
    assert ours == epsilon(3.0, examples=75, sampling=Poisson(12), **asked)
    assert group_epsilon(2, 3.0, examples=1000, sampling=Balanced(12, SHARES), **asked) > ours


@pytest.mark.parametrize(("sigma", "rounds"), [(3.0, 300), (1.2, 20)])
def test_the_price_is_that_of_an_accountant_of_its_own(sigma, rounds):
    delta, sampling = 1e-5, Balanced(12, SHARES)
    claimed = epsilon(sigma, examples=1000, rounds=rounds, sampling=sampling, delta=delta)
    low, high = worse_of_both([(poisson_gaussian(4 / 25, sigma), rounds)], delta, claimed)
    assert low <= claimed <= 1.01 * high
    common, _ = worse_of_both([(poisson_gaussian(4 / 900, sigma), rounds)], delta, claimed)
    assert common < 0.2 * claimed, "an example of the frequent class pays far less than what is stated"


def among(rate: float, classes: list[tuple[int, float]], a: float, sigma: float) -> Round:
    """The sum with an example at `rate` that adds 1, among others at rates of their own that add -a each."""
    counts = np.ones(1)
    for held, chance in classes:
        counts = np.convolve(counts, binom.pmf(np.arange(held + 1), held, chance))
    likely = np.flatnonzero(counts > 1e-20)
    x = np.linspace(min(-a * likely) - 13 * sigma, 1 + max(-a * likely) + 13 * sigma, 20_001)
    p, q = np.zeros_like(x), np.zeros_like(x)
    for k in likely:
        alone = normal(x, -a * k, sigma)
        p += counts[k] * ((1 - rate) * alone + rate * normal(x, 1 - a * k, sigma))
        q += counts[k] * alone
    return Round(x, p, q)


@pytest.mark.parametrize("held", [(180, 20), (20, 180), (0, 40)])
@pytest.mark.parametrize("a", [0.0, 0.4, -1.0])
def test_no_example_costs_more_than_is_claimed_whatever_a_worker_holds(held, a):
    """Literally: the example is there or it is not, in either class, and the others are drawn as before."""
    sampling, asked = Balanced(16, (0.9, 0.1)), {"examples": 200, "rounds": 100, "delta": 1e-5}
    sigma = calibrate(2.0, sampling=sampling, **asked)
    claimed = epsilon(sigma, sampling=sampling, **asked)
    rates = sampling.rates(200)
    for rate in rates:
        one = among(rate, list(zip(held, rates, strict=True)), a, sigma)
        low, high = worse_of_both([(one, 100)], 1e-5, 2.0)
        assert low <= claimed
        assert high <= 1.005 * claimed, "no more than what our own computation is unsure of"


def test_a_sample_of_few_is_as_unsure_as_it_is():
    """The variance of a mean over balanced draws is that of a plain mean over `as_many` examples."""
    sampling = Balanced(16, (0.95, 0.05))
    classes = torch.arange(2).repeat_interleave(torch.tensor([1900, 100]))
    weights = torch.tensor(sampling.rates(2000), dtype=torch.float64)[classes] / 16
    assert sampling.as_many(2000) == round(float(weights.sum() ** 2 / weights.square().sum())) == 380


def test_a_run_takes_the_shares_of_the_honest_workers_and_says_so(toy, tmp_path):
    spec = Spec(sampling="balanced", workers=4, **GIVEN)
    data = toy()
    ready = prepare(spec, CPU, data)
    mechanism, sizes = ready.federation.mechanism, ready.federation.workers.sizes
    held = ready.federation.workers.holdings[torch.arange(int(sizes.max())) < sizes[:, None]]
    shares = data.y[held].bincount(minlength=data.classes).double() / len(held)
    assert mechanism.sampling == Balanced(12, tuple(shares.tolist()))
    found = noisegate.run(spec, compute=CPU, dataset=data, out=tmp_path / "run")
    assert found.class_shares == pytest.approx(shares.tolist())
    assert found.class_rates == list(mechanism.sampling.rates(found.declared))
    assert found.sampling_rate == max(found.class_rates)
    assert noisegate.load(tmp_path / "run").class_rates == found.class_rates
    given = noisegate.run(replace(spec, class_shares=[3, 1, *[1] * (data.classes - 2)]), compute=CPU, dataset=data)
    assert given.class_shares == [3, 1, *[1] * (data.classes - 2)]


def test_costs_of_a_balanced_run(toy):
    spec = Spec(sampling="balanced", workers=4, class_shares=[0.4, *[0.6 / 9] * 9], **GIVEN)
    data = toy(classes=10)
    found = noisegate.run(spec, compute=CPU, dataset=data)
    cost = terms_of(spec, prepare(spec, CPU, data)).cost
    assert cost == training_of(found.as_dict()).cost
    assert spec.batch / cost.declared >= found.sampling_rate > spec.batch / (cost.declared + 1)
    assert together([cost, cost], 1e-5) > together([cost], 1e-5)
    draws = priced_draws(spec, found.as_dict())
    again = epsilon(found.sigma, rounds=found.rounds, delta=found.delta, accountant="rdp", **draws)
    assert again == found.epsilon == max(found.worker_epsilons)
    with pytest.raises(SpecError, match=f"'poisson' with declared = {cost.declared}, which is what the rarest"):
        audit(spec, compute=CPU, dataset=data)
    with pytest.raises(SpecError, match="'balanced': a federation samples by poisson alone"):
        check_trial(Spec(sampling="balanced", attack="none", byzantine=0.0))


def test_the_server_expects_what_classes_and_sizes_give(toy):
    """A worker that holds only what is rare draws more. In a secret run nothing tells what anybody holds."""
    data = rare(0.1, workers=4, each=300)
    owner = torch.where(data.y == 1, 3, torch.arange(len(data.y)) % 3)
    data = replace(data, owner=owner)
    spec = Spec(sampling="balanced", **GIVEN)
    run = prepare(spec, CPU, data).federation
    expected = run.server.expected
    rows = [owner[run.workers.holdings[i, : run.workers.sizes[i]]].unique().item() for i in range(4)]
    assert float(expected[rows.index(3)]) == pytest.approx(2.0, rel=0.02), "half of all that four batches expect"
    assert sorted(expected.tolist())[:3] == pytest.approx([2 / 3] * 3, rel=0.05)
    assert prepare(replace(spec, sampling="poisson"), CPU, data).federation.server.expected[rows.index(3)] < 0.5
    secret = prepare(replace(spec, secret=True, class_shares=[0.9, 0.1]), CPU, data).federation
    assert secret.server.expected[rows.index(3)] < 0.5, "by its size alone"
    highest = secret.mechanism.sampling.rate(secret.mechanism.declared) * secret.mechanism.declared / 12
    assert secret.mechanism.most == pytest.approx(MOST_CLAIMED * highest)
    declared = prepare(replace(spec, secret=True, class_shares=[0.9, 0.1], declared=300), CPU, data).federation
    assert declared.server.expected is None


def test_a_worker_alone_draws_by_its_labels(toy):
    """As in a program of one's own, with noise of the operating system."""
    data = rare(0.1, workers=4, each=300)
    mechanism = prepare(Spec(sampling="balanced", workers=4, **GIVEN), CPU, data).federation.mechanism
    x, y = data.x[:50], data.y[:50]
    sent = upload_of_one(mechanism, mechanism.model.initial(), x, y, None, Secret(torch.device("cpu")).source)
    assert sent.isfinite().all()
    with pytest.raises(ValueError, match="labels: are needed"):
        mechanism.sampling.over(torch.tensor([5]), 300)
    with pytest.raises(SpecError, match="has no share for class 2"):
        Holdings.of_one(x, y + 1).draw(mechanism.sampling, 300, stream(1, "b"))


def test_a_secret_run_gives_shares_and_is_published(cli, tmp_path):
    with pytest.raises(SpecError, match="and they are secret; give class_shares, public numbers"):
        Spec(sampling="balanced", secret=True)
    shares = ",".join(["1"] * 9 + ["3"])
    done = cli("run", "--sampling", "balanced", "--class-shares", shares, "--rounds", 2, "--sigma", 3, "--secret",
               "--byzantine", 0, "--attack", "none", "--json", "--out", "run")  # fmt: skip
    assert done.status == 0, done.err
    assert done.json["class_shares"] == [1.0] * 9 + [3.0]
    assert cli("publish", "run", "-o", "public").status == 0
    said = json.loads((tmp_path / "public" / "privacy.json").read_text())
    assert (said["sampling"], said["class_rates"]) == ("balanced", done.json["class_rates"])
    assert said["sampling_rate"] == max(said["class_rates"])
    assert said["groups"]["2"] > said["epsilon"]
    text = " ".join((tmp_path / "public" / "privacy.txt").read_text().split())
    assert f"at most {said['sampling_rate']:.6g}, by its class" in text
    assert "at the public rate of its class" in text


def test_on_the_command_line(cli):
    priced = ("privacy", "--samples", 2000, "--rounds", 100, "--sigma", 3, "--sampling", "balanced")
    found = cli(*priced, "--class-shares", "0.95,0.05", "--json").json
    assert (found["sampling"], found["rate"]) == ("balanced", pytest.approx(0.08))
    assert "give --class-shares too" in cli(*priced).err
    table = cli("run", "--sampling", "balanced", "--rounds", 2, "--sigma", 3, "--no-baselines")
    assert "class rates" in table.out
    assert "must be numbers with commas" in cli("run", "--sampling", "balanced", "--class-shares", "a,b").err


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"class_shares": [0.5, 0.5]}, 'are for sampling = "balanced"; give both, or neither'),
        ({"sampling": "balanced", "class_shares": []}, "must be numbers above 0, one for each class"),
        ({"sampling": "balanced", "class_shares": [1.0, 0.0]}, "must be numbers above 0, one for each class"),
        ({"sampling": "balanced", "class_shares": [1.0, math.inf]}, "must be numbers above 0, one for each class"),
        ({"sampling": "balanced", "class_shares": [1.0, True]}, "must be numbers above 0, one for each class"),
        ({"sampling": "balanced", "class_shares": "0.95,0.05"}, "must be list"),
        ({"sampling": "balanced", "batch": "equal"}, "is drawn by poisson, not 'balanced'"),
    ],
)
def test_what_cannot_be_is_refused(settings, says):
    with pytest.raises(SpecError, match=says):
        Spec(**settings)


def test_shares_must_be_those_of_the_data(toy):
    with pytest.raises(SpecError, match="has 2 shares, and 'toy' 3 classes; give one for each class"):
        prepare(Spec(sampling="balanced", class_shares=[1, 2], workers=4, **GIVEN), CPU, toy())
    with pytest.raises(SpecError, match="must be numbers above 0"):
        Balanced(16, (0.0, 0.0))
    with pytest.raises(PrivacyError, match="leaves no noise"):  # what holds of every sampling holds of this one
        prepare_secret_without_noise(toy())


def prepare_secret_without_noise(data: Dataset) -> None:
    mechanism = prepare(Spec(sampling="balanced", workers=4, **GIVEN), CPU, data).federation.mechanism
    bare, source = replace(mechanism, sigma=0.0), Secret(torch.device("cpu")).source
    upload_of_one(bare, bare.model.initial(), data.x[:50], data.y[:50], None, source)


@pytest.mark.parametrize("attacked", [False, True], ids=["all honest", "60 % label-flip"])
def test_a_rare_class_is_learned(attacked):
    """5 % of two classes, 20 workers of 2,000, epsilon 2: .8 where the best model there can be has .853."""
    behave = {"byzantine": 0.6} if attacked else {"byzantine": 0.0, "attack": "none"}
    spec = Spec(dataset="rare", sampling="balanced", workers=20, rounds=150, **behave)
    found = noisegate.run(spec, compute=CPU, dataset=rare())
    assert found.epsilon <= 2
    assert found.balanced_accuracy >= 0.8
    assert min(found.recall) >= 0.75
    assert found.honest_rejected < 0.01
    assert found.byzantine_weight <= 0.2


def test_without_it_the_rare_class_is_not_learned():
    """What the claim above is worth."""
    spec = Spec(dataset="rare", workers=20, rounds=150, byzantine=0.0, attack="none")
    with pytest.warns(noisegate.errors.OneClassWarning):
        found = noisegate.run(spec, compute=CPU, dataset=rare())
    assert found.recall[1] < 0.1
