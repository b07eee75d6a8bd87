"""Class weights of a loss do nothing where every contribution has one length, and that is said."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import noisegate
from noisegate import Compute, Spec
from noisegate.attacks import ATTACKS
from noisegate.errors import NoisegateWarning
from noisegate.vectors import FlatModel, cross_entropy
from noisegate.workers import WORKERS, Clipped, Normalized, ignored_weights
from noisegate.workers.class_weights import class_factors, scales_to_one_length

CPU = Compute(device="cpu")
WEIGHTS = torch.tensor([1.0, 3.0, 0.5])
GIVEN = {"sigma": 4.0, "sigma_base": 4.0, "accountant": "rdp", "batch": 8, "rounds": 2, "byzantine": 0.0}


def focal(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    each = functional.cross_entropy(outputs, y, reduction="none")
    return WEIGHTS[y] * (1 - torch.exp(-each)) ** 2 * each


def margins(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Class 1 must win by more: no factor."""
    return functional.cross_entropy(outputs - 2.0 * functional.one_hot(y, 3) * (y == 1)[:, None], y, reduction="none")


def logit(weight: float):
    def loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        more = torch.tensor(weight)
        each = functional.binary_cross_entropy_with_logits(outputs[:, 0], y.float(), reduction="none", pos_weight=more)
        return each

    return loss


def model(loss, outputs: int = 3) -> FlatModel:
    torch.manual_seed(0)
    return FlatModel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs)), loss)


@pytest.mark.parametrize(
    ("loss", "outputs", "found"),
    [
        (nn.CrossEntropyLoss(weight=WEIGHTS, reduction="none"), 3, [1, 3, 0.5]),
        (nn.CrossEntropyLoss(reduction="none"), 3, [1, 1, 1]),
        (nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1), 3, [1, 1, 1]),
        (focal, 3, [1, 3, 0.5]),
        (margins, 3, None),
        (logit(19.0), 1, [1, 19]),
        (logit(1.0), 1, [1, 1]),
        (lambda outputs, y: outputs.sum(1) * 0, 3, None),
        (lambda outputs, y: outputs[:, 7], 3, None),
    ],
    ids=["weights", "none", "smooth", "focal", "margins", "logit", "even logit", "zero", "fails"],
)
def test_factors_of_classes(loss, outputs, found):
    """Against what each loss was made of. A loss that treats classes unlike in another way has no factors."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    factors = class_factors(model(loss, outputs), x)
    assert factors == (None if found is None else pytest.approx(found, rel=1e-3))


def test_who_scales_to_one_length():
    lets_through = {name for name, kind in WORKERS.items() if not scales_to_one_length(kind())}
    assert lets_through == {"clipped", "clipped-momentum"}
    assert "inner" in ATTACKS  # the catalogs are there


def test_the_line():
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    weighing = model(nn.CrossEntropyLoss(weight=WEIGHTS, reduction="none"))
    line = ignored_weights(weighing, Normalized(), x)
    assert line.startswith("loss: weighs some classes 6 times as much as others, and that does nothing: Normalized")
    assert "sampling = 'balanced'" in line
    assert "'clipped'" in line
    assert "\n" not in line
    assert ignored_weights(weighing, Clipped(), x) is None
    assert ignored_weights(model(nn.CrossEntropyLoss(reduction="none")), Normalized(), x) is None
    assert ignored_weights(model(cross_entropy), Normalized(), x) is None


def test_it_is_true_and_a_run_says_it(toy):
    """With weights a normalized run is what it is without them, but for rounding and momentum; a clipped one is not."""
    weights = torch.linspace(1, 5, 10)
    weighing = nn.CrossEntropyLoss(weight=weights, reduction="none")
    spec, data = Spec(workers=4, aggregator="mean", attack="none", **GIVEN), toy(classes=10)
    with pytest.warns(NoisegateWarning, match="weighs some classes 5 times as much as others"):
        noisegate.run(spec, compute=CPU, dataset=data, loss=weighing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        noisegate.run(spec, compute=CPU, dataset=data)
        clipped = Spec(**{**spec.canonical(), "worker": "clipped"})
        noisegate.run(clipped, compute=CPU, dataset=data, loss=weighing)


def test_without_momentum_the_contributions_are_the_same():
    from noisegate.examples import Examples
    from noisegate.workers import Company, choose_sums

    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    y = torch.arange(16) % 3
    sums = []
    for loss in (nn.CrossEntropyLoss(weight=WEIGHTS, reduction="none"), nn.CrossEntropyLoss(reduction="none")):
        flat = model(loss)
        way = choose_sums(flat, flat.initial(), x, y, company=Company(16, 1))
        added = torch.zeros(1, flat.d)
        way.add(Normalized(0.0), flat.initial(), Examples.of_one(x, y), torch.zeros_like(added), added)
        sums.append(added)
    assert torch.allclose(*sums, atol=1e-5)


@pytest.mark.filterwarnings("default")
def test_on_the_command_line(cli, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef loss(outputs, y):\n"
        "    weight = torch.linspace(1, 5, 10)\n"
        "    return nn.functional.cross_entropy(outputs, y, weight=weight, reduction='none')\n"
    )
    done = cli("run", "--loss", "mine.py:loss", "--rounds", 2, "--sigma", 3, "--no-baselines")
    assert done.err.count("noisegate: warning: loss: weighs some classes 5 times as much as others") == 1
