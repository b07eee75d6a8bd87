"""What a model gives: a score for each class, or one logit for two classes, and nothing else."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import noisegate
from noisegate import Compute, Dataset, Spec, SpecError
from noisegate.protocol import Mechanism
from noisegate.runs.setup import prepare
from noisegate.sampling import Poisson
from noisegate.simulate import accuracy
from noisegate.streams import stream
from noisegate.vectors import FlatModel, check_outputs, cross_entropy, scores_of
from noisegate.workers import ClosedForm, Normalized

CPU = Compute(device="cpu", threads=1)
GIVEN = {"sigma": 0.5, "sigma_base": 0.5, "accountant": "rdp", "batch": 16, "rounds": 40, "byzantine": 0.0, "rate": 1.0}
"""Little noise that is given, so that what is learned is seen."""

ENOUGH = 0.9
"""The accuracy that every sound run below has: the classes are far apart."""


def two_classes(share: float = 0.5, size: int = 600) -> Dataset:
    """Two clouds, of which class 1 has this share."""
    rng = stream(1, "two classes")
    y = (torch.rand(2 * size, generator=rng) < share).long()
    x = torch.randn(2 * size, 4, generator=rng) + 3.0 * (2 * y[:, None] - 1)
    return Dataset("two", x[:size], y[:size], x[size:], y[size:], 2)


class Shaped(nn.Module):
    """A linear layer whose outputs are given another shape."""

    def __init__(self, outputs: int, shape) -> None:
        super().__init__()
        self.linear, self.shape = nn.Linear(4, outputs), shape
        nn.init.zeros_(self.linear.weight), nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.shape(self.linear(x))


ONE_LOGIT = {"(N, 1)": lambda z: z, "(N,)": lambda z: z[:, 0]}


def test_one_logit_stands_for_the_scores_zero_and_itself():
    logit = torch.tensor([-2.0, 0.5, 30.0, -200.0])
    y = torch.tensor([1, 1, 0, 0])
    for outputs in (logit, logit[:, None]):
        assert scores_of(outputs).argmax(1).tolist() == [0, 1, 1, 0]
        wanted = functional.binary_cross_entropy_with_logits(logit, y.float(), reduction="none")
        torch.testing.assert_close(cross_entropy(outputs, y), wanted)
    plain = torch.randn(5, 3)
    assert scores_of(plain) is plain


@pytest.mark.parametrize("shape", ONE_LOGIT)
@pytest.mark.parametrize("aggregator", ["fortified", "fltrust"])
def test_one_logit_is_as_accurate_as_two_outputs(shape, aggregator):
    data, spec = two_classes(), Spec(**GIVEN, aggregator=aggregator, workers=4)
    found = noisegate.run(spec, dataset=data, model=Shaped(1, ONE_LOGIT[shape]), compute=CPU)
    assert found.accuracy > ENOUGH, "and not the share of class 0"
    assert found.accuracy == pytest.approx(found.curve[-1]["accuracy"])
    assert min(found.recall) > ENOUGH
    assert found.parameters == 5


@pytest.mark.parametrize("shape", ONE_LOGIT)
def test_one_logit_takes_the_closed_form(shape):
    sums = prepare(Spec(**GIVEN, workers=2), CPU, two_classes(), Shaped(1, ONE_LOGIT[shape])).federation.mechanism.sums
    assert isinstance(sums, ClosedForm)


def test_one_logit_with_a_trigger_with_several_runs_and_with_attackers():
    data, module = two_classes(), Shaped(1, ONE_LOGIT["(N,)"])
    spec = Spec(**GIVEN | {"byzantine": 0.4}, workers=4, attack={"name": "backdoor", "target": 1, "size": 1})
    found = noisegate.run(spec, dataset=data, model=module, compute=CPU)
    assert 0 <= found.attack_success <= 1
    assert found.accuracy > ENOUGH
    for attack in ("label-flip", "gradient-ascent", "trojan", "inner-tuned"):
        settings = GIVEN | {"byzantine": 0.3, "rounds": 2, "attack": attack}
        assert noisegate.run(Spec(**settings, workers=4), dataset=data, model=module, compute=CPU).rounds == 2


@pytest.mark.parametrize("shape", ONE_LOGIT)
def test_a_loss_of_ones_own_gets_the_outputs_as_the_model_gives_them(shape):
    seen = []

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        seen.append(outputs.ndim)
        return functional.binary_cross_entropy_with_logits(outputs.reshape(-1), y.float(), reduction="none")

    module, data = Shaped(1, ONE_LOGIT[shape]), two_classes()
    found = noisegate.run(Spec(**GIVEN, workers=4), dataset=data, model=module, loss=loss, compute=CPU, label="bce")
    assert found.accuracy > ENOUGH
    assert set(seen) == {2 if shape == "(N, 1)" else 1}


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (Shaped(2, lambda z: z[..., None]), r"shape \(2, 2, 1\) for 2 examples.*give \(2, 2\).* or one logit;"),
        (Shaped(3, lambda z: z), r"shape \(2, 3\) for 2 examples.*give \(2, 2\)"),
        (Shaped(4, lambda z: z.reshape(-1, 2, 2)), r"shape \(2, 2, 2\)"),
        (Shaped(2, lambda z: (z, z)), "outputs of shape tuple"),
        (Shaped(1, lambda z: z.squeeze()), "one row per example"),
        (Shaped(1, lambda z: z[..., None]), r"shape \(2, 1, 1\)"),
        (Shaped(1, torch.sigmoid), "must be a logit.*leave the sigmoid out"),
        (Shaped(1, lambda z: torch.sigmoid(z)[:, 0]), "must be a logit.*leave the sigmoid out"),
    ],
)
@pytest.mark.parametrize("own_loss", [False, True])
def test_other_outputs_are_refused_in_one_line_before_training(module, sentence, own_loss):
    more = {"loss": lambda outputs, y: (outputs - y[:, None]).square().sum(1), "label": "mine"} if own_loss else {}
    watched = []
    with pytest.raises(SpecError, match=sentence) as caught:
        noisegate.run(
            Spec(**GIVEN, workers=2),
            dataset=two_classes(),
            model=module,
            compute=CPU,
            **more,
            watch=lambda *_: watched.append(1),
        )
    assert "\n" not in str(caught.value)
    assert not watched


def test_one_logit_cannot_tell_three_classes_apart():
    data = two_classes()
    three = Dataset("three", data.x, data.y + (data.x[:, 0] > 3).long(), data.x, data.y, 3)
    with pytest.raises(SpecError, match=r"shape \(2, 1\) for 2 examples.*give \(2, 3\), one number for each class"):
        noisegate.run(Spec(**GIVEN, workers=2), dataset=three, model=Shaped(1, lambda z: z), compute=CPU)


def test_a_program_that_does_not_say_how_many_classes_there_are_is_checked_too():
    data = two_classes()
    for shape in ONE_LOGIT.values():
        model = FlatModel(Shaped(1, shape))
        mechanism = Mechanism.of(model, (data.x, data.y), Normalized(), Poisson(16), 1.0, declared=100)
        assert mechanism.batch == 16
        assert 0 <= accuracy(model, model.initial(), data.x_test, data.y_test) <= 1
    with pytest.raises(SpecError, match="tells 2 classes apart, but there is an example with the label 2"):
        Mechanism.of(model, (data.x, data.y + 1), Normalized(), Poisson(16), 1.0, declared=100)
    with pytest.raises(SpecError, match=r"give \(N, classes\)"):
        Mechanism.of(FlatModel(Shaped(2, lambda z: z[..., None])), (data.x, data.y), Normalized(), Poisson(8), 1.0, 100)


def test_outputs_are_checked_by_their_shape():
    (
        check_outputs(torch.zeros(3, 2), 3, 2),
        check_outputs(torch.zeros(3), 3, 2),
        check_outputs(torch.zeros(3, 5), 3, None),
    )
    for wrong in (torch.zeros(()), torch.zeros(2, 2), torch.zeros(3, 0), torch.zeros(1, 3, 2), None):
        with pytest.raises(SpecError, match="noisegate trains classifiers"):
            check_outputs(wrong, 3, 2)
