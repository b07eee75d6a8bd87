"""A CUDA device computes what a CPU computes. Skipped where there is none."""

from dataclasses import replace

import pytest
import torch

import noisegate
from noisegate.aggregators.noise_tests import ks_rejects
from noisegate.lab.setup import Setup, prepare
from noisegate.models import build_model
from noisegate.simulate import start, train
from noisegate.streams import stream
from noisegate.vectors import FlatModel
from noisegate.workers import Normalized, choose_sums
from noisegate.workers.closed_form import ClosedForm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

ONE_ROUND = 1e-4  # float32 on another device: other orders of addition, nothing else


def examples(workers: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = stream(0, "cuda-test")
    owner = torch.arange(workers).repeat_interleave(5)
    return torch.randn(len(owner), 1, 28, 28, generator=rng), torch.arange(len(owner)) % 10, owner


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_sums_agree_with_the_cpu(name: str) -> None:
    module = build_model(name, (1, 28, 28), 10, stream(0, "weights"))
    x, y, owner = examples()
    last = torch.randn(6, FlatModel(module).d, generator=stream(0, "last")) * 0.05
    found = []
    for device in ("cpu", "cuda"):
        model = FlatModel(module, device=device)
        params, moved = model.initial(), [value.to(device) for value in (x, y, owner, last)]
        with noisegate.Compute().exact():
            sums = choose_sums(model, params, moved[0][:4], moved[1][:4], way="closed-form")
            found.append(sums(Normalized(), params, *moved).cpu())
    assert (found[0] - found[1]).norm() <= ONE_ROUND * found[0].norm()
    assert ClosedForm.of(FlatModel(module)) is not None


def test_noise_tests_agree_with_the_cpu() -> None:
    uploads = torch.randn(400, 5000, generator=stream(0, "uploads"))
    assert torch.equal(ks_rejects(uploads, 1.0, 0.05), ks_rejects(uploads.cuda(), 1.0, 0.05).cpu())


def setup(device: str, model: str = "mlp") -> Setup:
    rng = stream(0, "pictures")
    y = torch.arange(1020) % 10
    x = torch.randn(len(y), 1, 28, 28, generator=rng) + y[:, None, None, None] / 5
    dataset = noisegate.Dataset("pictures", x, y, x[:100], y[:100], 10)
    spec = noisegate.Spec(
        model=model, workers=5, rounds=12, sigma=20.0, sigma_base=20.0, epsilon=2.0, aggregator="two-stage"
    )
    return prepare(spec, noisegate.Compute(device=device), dataset)


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_same_spec_same_bytes(model: str) -> None:
    runs = []
    for _ in range(2):
        ready = setup("cuda", model)
        with noisegate.Compute().exact():
            *_, last = train(ready.federation, start(ready.federation), ready.x_test, ready.y_test, 5)
        runs.append(last)
    assert torch.equal(runs[0].state.params, runs[1].state.params)
    assert torch.equal(runs[0].reasons, runs[1].reasons)
    assert runs[0].curve == runs[1].curve


def test_a_round_gives_a_verdict_on_the_device() -> None:
    ready = setup("cuda")
    honest = replace(ready.federation, rounds=1)
    *_, last = train(honest, start(honest), ready.x_test, ready.y_test, 1)
    assert last.state.params.is_cuda
    assert last.state.params.isfinite().all()
