"""What scattering says of a texture: logarithms of its averages over a picture, whichever way the picture is turned.

Where things lie in a picture of a tissue or of a fabric says nothing, and neither does which way is up. What says much
is how much there is of every scale, in proportion. So coefficients are averaged over the picture and over all turns of
it by an angle of the wavelets, which leaves of two angles how far they are apart, and the logarithm is taken
(L. Sifre, S. Mallat, "Rotation, Scaling and Deformation Invariant Scattering for Texture Discrimination", CVPR 2013).

Neighboring scales say nearly the same, so one step of training would go far along what they share. The features are
made independent of each other as they are in noise whose spectrum falls with the frequency, as that of natural pictures
does (D. Field, J. Opt. Soc. Am. A 4(12), 1987). That noise is drawn from a fixed seed: it is a constant of this code,
and follows no one's data.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from noisegate.errors import SpecError
from noisegate.features.scattering import VERSION, Scattering, coefficients, usual_scales
from noisegate.streams import stream

FLOOR = 1e-3
"""Added before a logarithm is taken. Pictures are taken to vary by about 1, as those of noisegate's readers do."""

RIDGE = 0.1
"""Added to the variances of the noise: directions in which it varies by less are not made larger than that."""

PICTURES = 128
FALLS = 0.5, 2.5
"""How many noise pictures there are, and the exponents by which their spectra fall."""


@dataclass(frozen=True)
class Texture(Scattering):
    """Averages of scattering over a picture of (channels, height, width), whichever way it is turned.

    scales, angles, length: as of `scattering`. Features that are fewer are longer, so that one rate does for both.
    """

    length: float = 12.0

    @property
    def key(self) -> str:
        """What the features of a picture depend on beside it, as text."""
        return f"texture {VERSION} {self.scales} {self.angles} {self.length!r}"

    def __call__(self, x: Tensor) -> Tensor:
        """(B, c, h, w) -> (B, numbers)."""
        if x.dim() != 4 or min(x.shape[1:]) < 1:
            raise SpecError(
                f"features 'texture' cannot take examples of shape {tuple(x.shape[1:])}: they need (channels, height, "
                "width); reshape the data, or leave features out"
            )
        channels, height, width = x.shape[1:]
        scales = self.scales or usual_scales(height, width)
        center, scale = _constants(channels, height, width, scales, self.angles)
        found = (measured(x, scales, self.angles) - center.to(x.device)) @ scale.to(x.device)
        norms = torch.linalg.vector_norm(found, dim=1, keepdim=True)
        scaled: Tensor = found * (self.length / norms.clamp_min(FLOOR))
        return scaled


def measured(x: Tensor, scales: int, angles: int) -> Tensor:
    """(B, c, h, w) -> (B, numbers): averages, logarithms of averages, and logarithms of how far the maps vary."""
    maps = coefficients(x.flatten(0, 1), scales, angles).unflatten(0, x.shape[:2])  # (B, c, paths, rows, columns)
    first = maps[:, :, 1 : 1 + scales * angles].unflatten(2, (scales, angles)).mean(3)
    second = maps[:, :, 1 + scales * angles :].mean((-2, -1)).unflatten(2, (-1, angles, angles))
    turned = torch.stack([second.diagonal(0, -2, -1).mean(-1)] + [_apart(second, by) for by in range(1, angles)], -1)
    blurred = maps[:, :, :1]
    energies = torch.cat([first.mean((-2, -1)), turned.flatten(2)], 2)
    spreads = torch.cat([blurred, first], 2).std((-2, -1), correction=0)
    logs = torch.cat([energies, spreads], 2).clamp_min(0).add(FLOOR).log()
    return torch.cat([blurred.mean((-2, -1)), logs], 2).flatten(1)


def _apart(second: Tensor, by: int) -> Tensor:
    """The average over all pairs of angles that are so far apart: (B, c, pairs, angles, angles) -> (B, c, pairs)."""
    rolled = second.roll(-by, -1)
    return rolled.diagonal(0, -2, -1).mean(-1)


@functools.lru_cache(maxsize=8)
def _constants(channels: int, height: int, width: int, scales: int, angles: int) -> tuple[Tensor, Tensor]:
    """The mean of what is measured of noise, and the matrix that makes it independent. Always computed on the CPU."""
    pictures = noise(PICTURES, channels, height, width)
    seen = torch.cat([measured(some, scales, angles) for some in pictures.split(8)]).double()
    center, spread = seen.mean(0), seen.std(0).clamp_min(FLOOR)
    values, vectors = torch.linalg.eigh(((seen - center) / spread).T.cov())
    white = vectors @ torch.diag((values.clamp_min(0) + RIDGE).rsqrt()) @ vectors.T
    return center.float(), (white / spread[:, None]).float()


def noise(count: int, channels: int, height: int, width: int) -> Tensor:
    """Pictures of noise, each with a fall of its spectrum, a contrast, a brightness and a share of color of its own."""
    rng = stream(0, "noise of textures")

    def one_each(draw: Tensor) -> Tensor:
        return draw.view(-1, 1, 1, 1)

    frequency = (torch.fft.fftfreq(height)[:, None].square() + torch.fft.rfftfreq(width).square()).sqrt()
    frequency[0, 0] = torch.inf  # no mean
    fall = one_each(FALLS[0] + (FALLS[1] - FALLS[0]) * torch.rand(count, generator=rng))
    spectra = torch.fft.rfft2(torch.randn(count, channels, height, width, generator=rng)) * frequency**-fall
    waves = _of_size_one(torch.fft.irfft2(spectra, s=(height, width)))
    gray = one_each(torch.rand(count, generator=rng))
    waves = _of_size_one(gray * waves[:, :1] + (1 - gray) * waves)
    contrast = one_each(torch.exp(torch.randn(count, generator=rng) / 2))
    return waves * contrast + torch.randn(count, channels, 1, 1, generator=rng)


def _of_size_one(pictures: Tensor) -> Tensor:
    return pictures / pictures.std((1, 2, 3), correction=0, keepdim=True).clamp_min(FLOOR)
