"""Texture features: averages of scattering, whichever way a picture is turned, and constants that follow no data."""

import pytest
import torch

from noisegate import SpecError
from noisegate.features import Scattering, Texture, build_features, check_features
from noisegate.features.scattering import coefficients
from noisegate.features.texture import FLOOR, _constants, measured, noise
from noisegate.streams import stream


def pictures(count: int = 24) -> torch.Tensor:
    """Stripes of all directions on a torus, so that to turn one is to turn what is seen of it."""
    places = torch.arange(16.0)
    rng = stream(1, "stripes")
    waves = torch.randint(0, 5, (count, 2), generator=rng)
    turns = (waves[:, :1, None] * places[:, None] + waves[:, 1:, None] * places) / 16
    return torch.cos(2 * torch.pi * turns)[:, None] + 0.1 * torch.randn(count, 1, 16, 16, generator=rng)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(((one - other).flatten(1).norm(dim=1) / one.flatten(1).norm(dim=1)).median())


def test_a_turned_picture_has_nearly_the_same_features():
    x = pictures()
    turned = x.rot90(1, (2, 3))
    texture = Texture(scales=2)
    another = apart(texture(x), texture(x.roll(1, 0)))
    assert apart(texture(x), texture(turned)) < 0.4 * another
    assert apart(Scattering()(x), Scattering()(turned)) > 0.7


def test_what_is_measured_is_the_average_over_angles_by_a_loop():
    x, scales, angles = pictures(3), 2, 4
    maps = coefficients(x[:, 0], scales, angles)
    found = measured(x, scales, angles)
    for example in range(3):
        mean = maps[example].mean((1, 2))
        first = [maps[example, 1 + j * angles : 1 + (j + 1) * angles].mean(0) for j in range(scales)]
        pair = [
            sum(mean[1 + scales * angles + a * angles + (a + by) % angles] for a in range(angles)) / angles
            for by in range(angles)
        ]
        energies = [one.mean() for one in first] + pair
        spreads = [one.std(correction=0) for one in (maps[example, 0], *first)]
        expected = torch.stack([mean[0], *((value.clamp_min(0) + FLOOR).log() for value in (*energies, *spreads))])
        assert found[example].allclose(expected, atol=1e-4)


def test_the_constants_make_noise_independent_and_follow_nothing_but_the_shape():
    center, white = _constants(1, 16, 16, 1, 8)
    seen = (measured(noise(512, 1, 16, 16), 1, 8) - center) @ white
    variances = torch.linalg.eigvalsh(seen.T.cov())
    assert float(variances.max()) < 1.5
    assert float(seen.mean(0).abs().max()) < 0.5
    _constants.cache_clear()
    torch.rand(3)  # moves the global generator
    again = _constants(1, 16, 16, 1, 8)
    assert torch.equal(again[0], center)
    assert torch.equal(again[1], white)


def test_texture_is_of_each_example_alone_and_of_a_stated_length():
    color = torch.randn(40, 3, 16, 16, generator=stream(2, "color"))
    assert check_features(build_features("texture"), color, stream(1, "test")) == (3 * (1 + 1 + 2),)
    assert Texture()(color).norm(dim=1).allclose(torch.tensor(12.0), rtol=1e-4)
    assert bool(torch.isfinite(Texture()(torch.zeros(2, 1, 16, 16))).all())
    with pytest.raises(SpecError, match="channels, height, width"):
        Texture()(torch.rand(4, 30))
