"""Scattering coefficients: against direct convolutions, for any size, and of each picture alone."""

import math

import numpy as np
import pytest
import torch

from noisegate import SpecError
from noisegate.features import Scattering
from noisegate.features.scattering import GROUP, coefficients, mirror, normalized, paths, usual_scales

CLOSE = 2e-5
"""How far float32 and Fourier transforms may be from float64 and sums, for values of about 1."""

REACH = 12
"""Turns around the grid that the oracle folds its filters by."""


def folded(function, size: tuple[int, int]) -> np.ndarray:
    """A function of (down, right) on a grid that is a torus, summed over its turns."""
    down, right = np.meshgrid(np.arange(size[0]), np.arange(size[1]), indexing="ij")
    reach = max(1, REACH * 8 // min(size))
    turns = range(-reach, reach + 1)
    return sum(function(down + a * size[0], right + b * size[1]) for a in turns for b in turns)


def morlet(size: tuple[int, int], j: int, angle: float, angles: int) -> np.ndarray:
    """The wavelet, from its formula."""

    def envelope(v, u):
        along, across = u * np.cos(angle) + v * np.sin(angle), v * np.cos(angle) - u * np.sin(angle)
        return np.exp(-(along**2 + (4 / angles) ** 2 * across**2) / (2 * (0.8 * 2**j) ** 2))

    def wave(v, u):
        along = u * np.cos(angle) + v * np.sin(angle)
        return envelope(v, u) * np.exp(1j * 0.75 * np.pi * 2.0**-j * along)

    whole = folded(envelope, size)
    raw = folded(wave, size)
    return (raw - whole * raw.sum() / whole.sum()) / whole.sum()


def convolve(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """The circular convolution, as a sum over all pixels."""
    found = np.zeros(x.shape, dtype=np.complex128)
    for a in range(x.shape[0]):
        for b in range(x.shape[1]):
            found += x[a, b] * np.roll(kernel, (a, b), axis=(0, 1))
    return found


def direct(picture: np.ndarray, scales: int, angles: int) -> np.ndarray:
    """Scattering coefficients from the definition, by direct convolutions in float64."""
    cell = 2**scales
    after = [math.ceil(size / cell) * cell - size + cell for size in picture.shape]
    x = picture
    for axis, size in enumerate(picture.shape):  # numpy reflects once at a time
        places = [(p if p < size else 2 * size - 1 - p) for p in (np.arange(-cell, size + after[axis]) % (2 * size))]
        x = np.take(x, places, axis=axis)
    grid, cells = x.shape, [math.ceil(size / cell) for size in picture.shape]

    def sampled(kernel: np.ndarray, level: int) -> np.ndarray:
        part = kernel[:: 2**level, :: 2**level] * 4**level
        return part - part.mean()

    def average(maps: np.ndarray, level: int) -> np.ndarray:
        step = 2**level
        width = 0.8 * 2 ** (scales - 1)
        blur = folded(lambda v, u: np.exp(-((step * v) ** 2 + (step * u) ** 2) / (2 * width**2)), maps.shape)
        smooth = convolve(maps, blur / blur.sum()).real
        first, each = cell // step, cell // step
        return smooth[first::each, first::each][: cells[0], : cells[1]]

    turns = [math.pi * number / angles for number in range(angles)]
    bank = [[morlet(grid, j, angle, angles) for angle in turns] for j in range(scales)]
    found, second = [average(x, 0)], []
    for j in range(scales):
        first = [np.abs(convolve(x, kernel))[:: 2**j, :: 2**j] for kernel in bank[j]]
        found += [average(one, j) for one in first]
        for k in range(j + 1, scales):
            step = 2 ** (k - j)
            second += [
                average(np.abs(convolve(one, sampled(kernel, j)))[::step, ::step], k)
                for one in first
                for kernel in bank[k]
            ]
    return np.stack(found + second)


@pytest.mark.parametrize(
    ("height", "width", "scales", "angles"), [(8, 8, 2, 4), (7, 10, 1, 8), (5, 6, 2, 2), (9, 12, 3, 2), (1, 3, 1, 2)]
)
def test_coefficients_are_those_of_direct_convolutions(height, width, scales, angles):
    picture = torch.rand(1, height, width, generator=torch.Generator().manual_seed(height))
    found = coefficients(picture, scales, angles)[0]
    cell = 2**scales
    assert found.shape == (paths(scales, angles), math.ceil(height / cell), math.ceil(width / cell))
    assert np.abs(found.numpy() - direct(picture[0].double().numpy(), scales, angles)).max() < CLOSE


def test_the_oracle_tells_another_wavelet():
    picture = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(1))
    found = coefficients(picture, 2, 4)[0].numpy()
    assert np.abs(found - direct(picture[0].double().numpy().T, 2, 4)).max() > 100 * CLOSE


@pytest.mark.parametrize(
    ("shape", "features"),
    [((1, 28, 28), (81, 7, 7)), ((3, 64, 64), (651, 8, 8)), ((1, 8, 8), (9, 4, 4)), ((2, 5, 33), (162, 2, 9))],
)
def test_pictures_of_any_size_gray_or_color(shape, features):
    found = Scattering()(torch.rand(3, *shape))
    assert tuple(found.shape[1:]) == features
    assert found.flatten(1).norm(dim=1).allclose(torch.tensor(8.0))


def test_a_picture_has_the_features_that_it_has_alone():
    pictures = torch.rand(9, 1, 28, 28, generator=torch.Generator().manual_seed(2))
    pictures[3] *= 1e6
    together = Scattering()(pictures)
    for number in (0, 3, 8):
        assert together[number].allclose(Scattering()(pictures[number : number + 1])[0], atol=1e-5)


def test_a_blank_picture_has_finite_features():
    for gray in (0.0, 1.0, -3.0):
        found = Scattering()(torch.full((1, 1, 28, 28), gray))
        assert bool(torch.isfinite(found).all())
        assert found.norm() < 8.001


def test_every_group_of_a_picture_is_normalized_by_itself():
    maps = torch.rand(2, 2 * GROUP, 3, 3)
    alone = normalized(maps[:1, :GROUP], 1.0)
    both = normalized(maps, 1.0)[:1, :GROUP]
    assert (both / both.norm()).allclose(alone, atol=1e-6)
    assert alone.mean().abs() < 1e-6


def test_a_grid_continues_as_in_a_mirror():
    assert mirror(3, 1).tolist() == [
        1,
        0,
        0,
        1,
        2,
        2,
        1,
        0,
    ]  # two before, four places of the picture's cells, two after


@pytest.mark.parametrize(("side", "scales"), [(8, 1), (16, 1), (28, 2), (32, 2), (64, 3), (224, 5), (1, 1)])
def test_the_usual_scales_leave_about_seven_cells(side, scales):
    assert usual_scales(side, side) == scales


@pytest.mark.parametrize(
    ("settings", "what"), [({"scales": 0}, "scales"), ({"angles": 65}, "angles"), ({"length": 0.0}, "length")]
)
def test_settings_that_no_scattering_can_have_are_refused(settings, what):
    with pytest.raises(SpecError, match=what):
        Scattering(**settings)


def test_examples_that_are_no_pictures_are_refused():
    with pytest.raises(SpecError, match="channels, height, width"):
        Scattering()(torch.rand(4, 30))
