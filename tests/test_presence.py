"""Whoever once earned trust and then sends noise alone: what an upload that leans on the last one tells of it."""

import math
from types import SimpleNamespace

import pytest
import torch

from noisegate.aggregators.fortified.trust import MOST_TRUST, along_last, leaning
from test_fortified_parts import SURE, normal

D, N, S, BATCH, LARGEST, MOMENTUM = 4000, 40, 0.02, 16, 1.0, 0.9
"""The lengths of the noise, 1.26, and of an example are about alike, as in a run."""

EXAMPLES = 0.6 * torch.eye(4, D)
"""What the server's examples would add, of four classes: 0.6 long each, so that they lean on the last upload by 0.8."""


def told(uploads, last, mix, contributions=EXAMPLES, momentum=MOMENTUM):
    """(n,) the log-likelihood ratios of a round."""
    view = SimpleNamespace(
        uploads=uploads,
        norms=uploads.norm(dim=1),
        last=last,
        momentum=momentum,
        noise_std=S,
        largest=LARGEST,
        batch=BATCH,
    )
    return leaning(view, contributions, mix, S**2, along_last(uploads, last))


def mixes(n: int) -> torch.Tensor:
    return torch.full((n, 4), 0.25)


def test_leaning_by_a_loop_over_workers_and_classes():
    contributions = torch.cat([0.3 * EXAMPLES[:1], EXAMPLES[:1], 0.9 * EXAMPLES[1:3], EXAMPLES[1:3], 2 * EXAMPLES[2:]])
    uploads, last = S * normal(3, D, name="uploads"), S * normal(3, D, name="last")
    uploads += 0.5 * last
    mix = torch.tensor([[0.25] * 4, [1.0, 0.0, 0.0, 0.0], [0.1, 0.2, 0.1, 0.1]])
    found = told(uploads, last, mix, contributions)
    each = len(contributions) // 4
    leans = [max(0.0, LARGEST**2 - float(row.double().square().sum())) ** 0.5 for row in contributions]
    leans = [min(lean, MOMENTUM * S * math.sqrt(D)) for lean in leans]
    for i in range(3):
        expected = sum(float(mix[i, c]) * sum(leans[c * each : (c + 1) * each]) / each for c in range(4))
        along = float(uploads[i].double() @ last[i].double() / last[i].double().norm())
        looked_for, variance = 0.5 * expected, S**2 + expected**2 / BATCH
        wanted = looked_for / variance * (min(along, expected + 2 * math.sqrt(variance)) - looked_for / 2)
        assert float(found[i]) == pytest.approx(wanted, rel=1e-3)


def test_nothing_is_told_without_momentum_or_before_the_second_upload():
    uploads = S * normal(N, D)
    nothing = torch.zeros(N, D)
    for last, momentum in ((uploads, 0.0), (nothing, MOMENTUM)):
        assert told(uploads, last, mixes(N), momentum=momentum).tolist() == [0.0] * N


def played(rounds: int, honest: bool) -> list[torch.Tensor]:
    """(N,) the log-likelihood ratio of every round, of honest uploads or of fresh noise alone."""
    last, ratios = torch.zeros(N, D), []
    for t in range(rounds):
        uploads = S * normal(N, D, name=f"noise {t} {honest}")
        if honest and t > 0:
            uploads += EXAMPLES.mean(0) + 0.8 * last / last.norm(dim=1, keepdim=True)
        ratios.append(told(uploads, last, mixes(N)))
        last = uploads
    return ratios


def test_who_sends_noise_alone_has_lost_all_trust_within_some_tens_of_rounds():
    presence = torch.full((N,), MOST_TRUST)  # all the trust that can be had
    for ratio in played(40, honest=False):
        presence = presence + ratio
    assert float(presence.max()) < -MOST_TRUST


def test_who_is_honest_loses_none():
    """The statistic of a round is above 0 on average, so that its sum does not stay below."""
    ratios = torch.stack(played(60, honest=True)[1:])
    assert float(ratios.mean()) > SURE * float(ratios.std()) / ratios.numel() ** 0.5
    presence = torch.zeros(N)
    for ratio in ratios:
        presence = (presence + ratio).clamp(-2 * MOST_TRUST, 0.0)
    assert float(presence.min()) > -1.0


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e15])
def test_the_ratio_is_finite_for_uploads_of_any_length(scale):
    uploads, last = scale * normal(N, D), scale * normal(N, D, name="last")
    assert told(uploads, last, mixes(N)).isfinite().all()
