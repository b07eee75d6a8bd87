"""The attack on float32 noise: it must succeed against torch's own, and fail against a sampler that is sound."""

import math
from dataclasses import replace

import pytest
import torch

from noisegate import Spec
from noisegate import audit as audit_module
from noisegate.audit import fuzz
from noisegate.audit.claim import claim_of
from noisegate.audit.grid import GridFinding, enough, grid_attack, grid_evidence, try_grid
from noisegate.compute import Compute
from noisegate.entropy import NOISE, Secret
from noisegate.runs.setup import prepare

STD, WIDTH, WORKERS = 0.15, 2048, 300


@pytest.fixture(scope="module")
def setup():
    return prepare(Spec(byzantine=0.0, attack="none", rounds=5), Compute(device="cpu"))


def fast(sums: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """As the simulator does it: float32 normals, and the sum added to them."""
    return torch.empty_like(sums).normal_(0.0, STD, generator=rng).add_(sums)


def sound(sums: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """As a secret run does it, from the operating system's entropy."""
    uploads = sums.clone()
    Secret(torch.device("cpu")).source(NOISE).add_noise(uploads, STD)
    return uploads


@pytest.fixture
def scene():
    """(contribution of an example to an upload, who drew it, the sums of everyone)."""
    rng = torch.Generator().manual_seed(7)
    contribution = torch.randn(WIDTH, generator=rng)
    contribution /= 16 * contribution.norm()
    drawn = torch.rand(WORKERS, generator=rng) < 0.2
    return contribution, drawn, drawn[:, None] * contribution


def test_fast_noise_gives_every_drawn_example_away(scene):
    contribution, drawn, sums = scene
    answer = grid_attack(fast(sums, torch.Generator().manual_seed(8)), contribution, STD)
    assert (answer == 1).eq(drawn).all()
    assert (answer[~drawn] == 0).float().mean() > 0.98


def test_sound_noise_gives_nothing_away(scene):
    contribution, drawn, sums = scene
    answer = grid_attack(sound(sums, torch.Generator().manual_seed(8)), contribution, STD)
    found = GridFinding(
        int(drawn.sum()), int((answer[drawn] == 1).sum()), int((~drawn).sum()), int((answer[~drawn] == 1).sum())
    )
    assert not found.beats(sigma=16 * STD, level=1e-4)  # secret noise is another one every time
    # Whatever it says, it says as often with the example as without: the difference is within four errors of zero.
    hit, false = found.told_drawn / found.drawn, found.told_wrong / found.not_drawn
    error = math.sqrt(0.25 / found.drawn + 0.25 / found.not_drawn)
    assert abs(hit - false) < 4 * error


def test_evidence_tells_torchs_normals_from_others():
    rng = torch.Generator().manual_seed(3)
    own = torch.empty(200, WIDTH).normal_(0.0, STD, generator=rng).double() / STD
    other = torch.randn(200, WIDTH, generator=rng, dtype=torch.float64)
    assert grid_evidence(own, own.abs()).min() > 0 > grid_evidence(other, other.abs()).max()
    beyond = own.clone()
    beyond[:, 0] = 6.0  # no uniform of 24 bits gives that
    assert (grid_evidence(beyond, beyond.abs()) < grid_evidence(own, own.abs())).all()


def test_the_real_path_gives_every_drawn_example_away(setup):
    """Issue 13, point 3: from one first-round upload, with a model that the server chose."""
    claim = claim_of(setup)
    found = try_grid(setup, claim, 1000)
    assert found.drawn == pytest.approx(1000 * claim.rate, abs=80)  # five errors
    assert found.told_drawn >= found.drawn - 1
    assert found.told_wrong == 0
    assert found.beats(claim.sigma, 1e-4)


def test_there_are_enough_uploads_however_small_the_rate(setup):
    claim = claim_of(setup)
    assert enough(claim) == 400
    rare = replace(claim, examples=3000)
    assert enough(rare) * rare.rate >= 40
    assert enough(replace(claim, examples=10**6)) == 8192


def test_the_same_path_in_a_secret_run_gives_nothing_away():
    secret = prepare(Spec(byzantine=0.0, attack="none", rounds=5, secret=True), Compute(device="cpu"))
    claim = claim_of(secret)
    found = try_grid(secret, claim, 1000)
    assert found.drawn > 60
    assert not found.beats(claim.sigma, 1e-4)  # secret noise is another one every time


def test_a_secret_run_is_refuted_by_the_attack_and_research_noise_is_named(setup, monkeypatch):
    monkeypatch.setattr(fuzz, "SETTINGS", 10)
    claim = claim_of(setup)

    def checks_of(secret: bool):
        parts, _, notes = audit_module._parts(setup, claim, secret, lambda *_: None)
        return next(check for check in parts if check.name == "noise: grid attack"), notes

    secret, notes = checks_of(True)
    assert secret.refuted
    assert not notes
    open_, notes = checks_of(False)
    assert not open_.refuted
    assert any("research noise: not to be published" in note for note in notes)
