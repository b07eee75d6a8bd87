"""The kernels of secret noise give what their plain twins give. Run by Triton's interpreter here, by a device there.

Without a device: `make kernels`, where Triton is installed.
"""

import pytest
import torch

from devices import needs_interpreter
from noisegate import entropy
from noisegate.chacha import words

pytestmark = needs_interpreter

KEY = torch.tensor([1, -2, 3, -4, 5, -6, 7, -(2**31)], dtype=torch.int32)
STREAM = KEY, torch.tensor([9], dtype=torch.int32), 1, 3


@pytest.mark.parametrize("count", [1, 8, 1001, 3000])
def test_bits(count):
    from noisegate.kernels import noise

    twin = entropy.joined(words(*STREAM, -(-count // 8))).flatten()[:count]
    assert torch.equal(noise.bits(count, STREAM), twin)


@pytest.mark.parametrize("count", [1, 7, 999, 2410])
@pytest.mark.parametrize("std", [0.05, 3e-4, 700.0])
def test_noise_on_the_grid(count, std):
    from noisegate.kernels import noise

    sums = torch.randn(count, generator=torch.Generator().manual_seed(count)) * std
    sent, constants = sums.clone(), entropy.constants(std, sums.device)
    noise.add_noise(sent, constants, STREAM)
    bits = entropy.joined(words(*STREAM, -(-count // 8)))
    drawn = entropy.normals(bits[0::2], bits[1::2]).flatten()[:count]
    twin = ((drawn * constants[0] + sums.double() * constants[2]).round() * constants[3]).float()
    assert (sent - twin).abs().max() <= constants[3]  # where rounding falls the other way, once in 2^40
    assert (sent == twin).float().mean() > 0.99
