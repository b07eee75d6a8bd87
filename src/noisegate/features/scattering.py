"""Scattering coefficients of pictures: wavelets and moduli, twice, then a local average. Nothing of it is learned.

J. Bruna, S. Mallat, "Invariant Scattering Convolution Networks", IEEE PAMI 35(8), 2013. That they suit private
training, with normalization over groups of channels and one linear layer: F. Tramer, D. Boneh, "Differentially Private
Learning Needs Better Features (or Much More Data)", ICLR 2021.

A picture is continued as in a mirror by 2^J pixels on every side. On that grid every convolution is circular, so it is
a product of Fourier transforms. With wavelets psi(j, angle), of scales j < J, and a Gaussian phi of the largest scale:

    order 0    x * phi
    order 1    |x * psi(j)| * phi
    order 2    ||x * psi(j)| * psi(k)| * phi    for j < k

all taken at every 2^J-th pixel. What was filtered at scale j is sampled at every 2^j-th pixel from there on.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from noisegate import checks
from noisegate.errors import SpecError

SIGMA, FREQUENCY = 0.8, 3 * math.pi / 4
"""Width in pixels and frequency of the finest wavelet."""

GROUP, LEVEL = 3, 1e-5
"""Channels that are normalized together, and the variance below which a group counts as flat."""

CELLS = 7
"""Unless told otherwise, J leaves a grid of about so many cells a side."""

MOST_SCALES, MOST_ANGLES = 8, 64

VERSION = 1
"""Changes when the same picture would have other features. It is a part of the name of what is kept on the disk."""


@dataclass(frozen=True)
class Scattering:
    """Scattering coefficients of (channels, height, width), gray or color, each picture normalized by itself.

    scales: J; unless given, it leaves a grid of about 7 cells a side (2 for 28 x 28, 3 for 64 x 64). angles: of the
    wavelets at each scale. length: of the features of a picture.
    """

    scales: int | None = None
    angles: int = 8
    length: float = 8.0

    def __post_init__(self) -> None:
        if self.scales is not None:
            checks.count(scales=self.scales)
            if self.scales > MOST_SCALES:
                raise checks.refuse("scales", self.scales, f"must be at most {MOST_SCALES}")
        checks.count(angles=self.angles)
        if self.angles > MOST_ANGLES:
            raise checks.refuse("angles", self.angles, f"must be at most {MOST_ANGLES}")
        checks.moderate(length=self.length)

    @property
    def key(self) -> str:
        """What the features of a picture depend on beside it, as text."""
        return f"scattering {VERSION} {self.scales} {self.angles} {self.length!r}"

    def work(self, shape: tuple[int, ...]) -> int:
        """How many coefficients an example of that shape has, for those who compute many at a time."""
        if len(shape) != 3:
            return 1  # and it will be refused
        scales = self.scales or usual_scales(*shape[1:])
        cells = math.prod(math.ceil(size / 2**scales) for size in shape[1:])
        return int(shape[0] * paths(scales, self.angles) * cells)

    def __call__(self, x: Tensor) -> Tensor:
        """(B, c, h, w) -> (B, c * paths, rows, columns)."""
        if x.dim() != 4 or min(x.shape[1:]) < 1:
            raise SpecError(
                f"features 'scattering' cannot take examples of shape {tuple(x.shape[1:])}: they need (channels, "
                "height, width); reshape the data, or leave features out"
            )
        channels, height, width = x.shape[1:]
        scales = self.scales or usual_scales(height, width)
        found = coefficients(x.flatten(0, 1), scales, self.angles)
        # One channel's paths after the other's: a group holds paths of one channel that are next to each other.
        return normalized(found.unflatten(0, (-1, channels)).flatten(1, 2), self.length)


def usual_scales(height: int, width: int) -> int:
    """J for pictures of that size."""
    return min(MOST_SCALES, max(1, round(math.log2(max(height, width) / CELLS))))


def normalized(maps: Tensor, length: float) -> Tensor:
    """(B, C, h, w) with mean 0 and variance 1 in every group of channels of every picture, then of that length.

    Of each picture by itself: no number here comes from another one.
    """
    groups = []
    for group in maps.split(GROUP, dim=1):
        mean = group.mean((1, 2, 3), keepdim=True)
        deviation = group - mean
        variance = deviation.square().mean((1, 2, 3), keepdim=True)
        groups.append(deviation / (variance + LEVEL).sqrt())
    found = torch.cat(groups, 1)
    norms = torch.linalg.vector_norm(found, dim=(1, 2, 3), keepdim=True)
    scaled: Tensor = found * (length / norms.clamp_min(LEVEL))
    return scaled


def coefficients(x: Tensor, scales: int, angles: int) -> Tensor:
    """(N, h, w) -> (N, paths, rows, columns), paths in the order of their order, scales and angles."""
    bank = Bank.of(x.shape[1], x.shape[2], scales, angles, x.device)
    x = bank.extended(x)
    spectrum = torch.fft.fft2(x)
    found, second = [bank.average(x[:, None], 0)], list[Tensor]()
    for j in range(scales):
        first = bank.filtered(spectrum[:, None], j, 0)  # (N, angles, ...)
        found.append(bank.average(first, j))
        if j + 1 < scales:
            inner = torch.fft.fft2(first)[:, :, None]
            second += [bank.average(bank.filtered(inner, k, j).flatten(1, 2), j=k) for k in range(j + 1, scales)]
    return torch.cat(found + second, 1)


@dataclass(frozen=True, eq=False)
class Bank:
    """The filters for pictures of one size. Level r of a grid is every 2^r-th pixel of it.

    rows, columns: which pixel of the picture lies where on the extended grid. wavelets: [j][r] the tiles of (angles,
    ...) spectra on level r, which add up to level j. down, right: [r] the local average as matrices, which also take
    every 2^J-th pixel.
    """

    rows: Tensor
    columns: Tensor
    wavelets: tuple[tuple[tuple[Tensor, ...], ...], ...]
    down: tuple[Tensor, ...]
    right: tuple[Tensor, ...]

    @staticmethod
    @functools.lru_cache(maxsize=16)
    def of(height: int, width: int, scales: int, angles: int, device: torch.device) -> "Bank":
        """The bank, made once."""
        rows, columns = (mirror(size, scales) for size in (height, width))
        grid = len(rows), len(columns)
        wavelets = tuple(tuple(_folding(grid, j, r, angles, device) for r in range(j + 1)) for j in range(scales))
        down, right = (
            tuple(averages(len(place), size, scales, r).to(device) for r in range(scales))
            for place, size in ((rows, height), (columns, width))
        )
        return Bank(rows.to(device), columns.to(device), wavelets, down, right)

    def extended(self, x: Tensor) -> Tensor:
        """The pictures on the extended grid."""
        found: Tensor = x.index_select(-2, self.rows).index_select(-1, self.columns)
        return found

    def filtered(self, spectrum: Tensor, j: int, level: int) -> Tensor:
        """|psi(j) * that|, with all angles as another dimension, at level j. level: of what the spectrum is of."""
        wavelets, step = self.wavelets[j][level], 2 ** (j - level)
        tiles = _tiles(spectrum, step)
        product = tiles[0] * wavelets[0]
        for tile, each in zip(tiles[1:], wavelets[1:], strict=True):
            product.addcmul_(tile.expand_as(product), each.expand_as(product))
        filtered: Tensor = torch.fft.ifft2(product).abs()
        return filtered

    def average(self, maps: Tensor, j: int) -> Tensor:
        """The local average of maps at level j, on the grid of the features."""
        found: Tensor = self.down[j] @ maps @ self.right[j].T
        return found


def _tiles(spectrum: Tensor, step: int) -> tuple[Tensor, ...]:
    """The step^2 tiles of spectra. Their mean is the spectrum of every step-th pixel of every step-th row."""
    height, width = spectrum.shape[-2] // step, spectrum.shape[-1] // step
    return tuple(
        spectrum[..., a * height : (a + 1) * height, b * width : (b + 1) * width]
        for a in range(step)
        for b in range(step)
    )


def mirror(size: int, scales: int) -> Tensor:
    """Which pixel lies where on the grid that a side of so many pixels is extended to: a multiple of 2^J of places."""
    cell = 2**scales
    places = torch.arange(-cell, math.ceil(size / cell) * cell + cell) % (2 * size)
    return torch.where(places < size, places, 2 * size - 1 - places)


def averages(places: int, size: int, scales: int, level: int) -> Tensor:
    """(cells, places / 2^level) the Gaussian of scale J around every 2^J-th pixel of the picture, circular."""
    cell = 2**scales
    centers = cell + cell * torch.arange(math.ceil(size / cell))
    apart = torch.arange(0, places, 2**level)[None] - centers[:, None]
    weights = _folded(lambda u: torch.exp(-u.square() / (2 * (SIGMA * cell / 2) ** 2)), apart, places)
    return (weights / weights.sum(1, keepdim=True)).float()


def wavelet(grid: tuple[int, int], j: int, angle: float, angles: int) -> Tensor:
    """A Morlet wavelet around the first place of a grid, circular: complex, with mean 0 and an envelope of sum 1."""
    envelope = torch.zeros(grid, dtype=torch.float64)
    wave = torch.zeros(grid, dtype=torch.complex128)
    width, slant = SIGMA * 2**j, 4 / angles
    down, right = (torch.arange(size, dtype=torch.float64) for size in grid)
    turns_down, turns_right = (_turns(size, width / min(1.0, slant)) for size in grid)
    for a in turns_down:
        for b in turns_right:
            v, u = down[:, None] + a * grid[0], right[None] + b * grid[1]
            along, across = u * math.cos(angle) + v * math.sin(angle), v * math.cos(angle) - u * math.sin(angle)
            here = torch.exp(-(along.square() + (slant * across).square()) / (2 * width**2))
            envelope += here
            wave += here * torch.exp(1j * FREQUENCY / 2**j * along)
    centered: Tensor = (wave - envelope * (wave.sum() / envelope.sum())) / envelope.sum()
    return centered


def _spectrum(grid: tuple[int, int], j: int, level: int, angles: int) -> Tensor:
    """(angles, ...) the spectra of the wavelets at scale j, for maps at that level."""
    each = [wavelet(grid, j, math.pi * number / angles, angles) for number in range(angles)]
    step = 2**level
    sampled = torch.stack(each)[:, ::step, ::step] * step**2
    sampled = sampled - sampled.mean((1, 2), keepdim=True)  # what it lost of its mean by being sampled
    spectra: Tensor = torch.fft.fft2(sampled).to(torch.complex64)
    return spectra


def _folding(grid: tuple[int, int], j: int, level: int, angles: int, device: torch.device) -> tuple[Tensor, ...]:
    """The tiles of those spectra, over how many they are."""
    step = 2 ** (j - level)
    tiles = _tiles(_spectrum(grid, j, level, angles).to(device), step)
    return tuple((tile / step**2).contiguous() for tile in tiles)


def _turns(size: int, width: float) -> range:
    """How many turns around a grid a Gaussian of that width reaches."""
    most = math.ceil(8 * width / size)
    return range(-most - 1, most + 1)


def _folded(function: Callable[[Tensor], Tensor], apart: Tensor, places: int) -> Tensor:
    """A function of distances, folded around a circle of so many places."""
    return torch.stack([function((apart + turn * places).double()) for turn in range(-2, 3)]).sum(0)


def paths(scales: int, angles: int) -> int:
    """How many coefficients there are at each place."""
    return 1 + scales * angles + math.comb(scales, 2) * angles**2
