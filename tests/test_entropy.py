"""Secret randomness: the right law, on a public grid, by a real cipher, and never twice."""

import math
import os
import pickle

import numpy as np
import pytest
import torch
from scipy.stats import kstest, norm

from noisegate import chacha, entropy
from noisegate.aggregators.ks_test import ks_rejects
from noisegate.aggregators.upload_lengths import norm_interval
from noisegate.entropy import Secret, grid_of, slack

CPU = torch.device("cpu")
STD = 0.05
WHOLE = bool(os.environ.get("NOISEGATE_SLOW"))
SAMPLES = 100_000_000 if WHOLE else 4_000_000
"""Of OpenSSL's bits. NOISEGATE_SLOW=1 takes moments over 1e8 samples, and the KS distance of each 4e6 of them."""

FIVE = 5.0
"""Standard deviations: a right sampler is further off once in two million times."""


def keyed(round: int = 0) -> Secret:
    """A secret source that draws as a CUDA device does, by the plain twin of the kernels."""
    secret = Secret(CPU)
    secret.key = torch.from_numpy(np.frombuffer(os.urandom(32), dtype=np.int32).copy())
    secret.round = torch.tensor([round], dtype=torch.int32)
    return secret


def noise(numbers: int, std: float = STD, secret: Secret | None = None) -> np.ndarray:
    drawn = torch.zeros(1, numbers)
    (secret or Secret(CPU)).source("noise").add_noise(drawn, std)
    return drawn[0].double().numpy() / std


@pytest.mark.parametrize("secret", [Secret(CPU), keyed()], ids=["openssl", "chacha20"])
def test_noise_is_normal_in_its_moments_and_distribution(secret):
    chunk = min(SAMPLES if secret.key is None else 1_000_000, 4_000_000)
    counts, total = np.zeros(5), 0
    ks = 0.0
    for _ in range((SAMPLES if secret.key is None else chunk) // chunk):
        z = noise(chunk, secret=secret)
        total += chunk
        counts += [np.sum(z), np.sum(z**2), np.sum(z**3), np.sum(z**4), np.sum(np.abs(z) > 4)]
        ks = max(ks, kstest(z, "norm").statistic * math.sqrt(chunk))
    mean, square, cube, fourth, tail = counts / total
    assert abs(mean) < FIVE / math.sqrt(total)
    assert abs(square - 1) < FIVE * math.sqrt(2 / total)
    assert abs(cube) < FIVE * math.sqrt(15 / total)
    assert abs(fourth - 3) < FIVE * math.sqrt(96 / total)
    beyond = 2 * norm.sf(4)
    assert abs(tail - beyond) < FIVE * math.sqrt(beyond / total)
    assert ks < 2.5  # exceeded by a right sampler with probability 7e-6


def test_noise_reaches_beyond_what_24_bits_can_give():
    """torch's float32 normals end at 5.77. The largest length here is that of 64 bits."""
    radius, angle = torch.tensor([[0]]), torch.tensor([[2**63 - 1]])
    assert entropy.normals(radius, angle).abs().max() == pytest.approx(math.sqrt(2 * 64 * math.log(2)), rel=1e-12)
    extreme = torch.tensor([[-(2**63), 2**63 - 1, 0, -1, 1]])
    assert entropy.normals(extreme, extreme.flip(1)).isfinite().all()


def test_every_upload_lies_on_one_public_grid_whatever_the_sums_are():
    grid = grid_of(STD)
    assert math.frexp(grid)[0] == 0.5  # a power of two
    assert STD / 8192 < grid <= STD / 4096
    for sums in (torch.zeros(3, 999), torch.randn(3, 999), torch.full((3, 999), math.pi), 1e-9 * torch.randn(3, 999)):
        for secret in (Secret(CPU), keyed()):
            sent = sums.clone()
            secret.source("noise").add_noise(sent, STD)
            assert torch.equal(sent.double() / grid, (sent.double() / grid).round())
            assert (sent - sums).abs().max() > STD


def test_the_sum_is_kept_and_rounding_adds_no_bias():
    sums = torch.linspace(-1, 1, 400_000).view(4, -1)
    for secret in (Secret(CPU), keyed()):
        sent = sums.clone()
        secret.source("noise").add_noise(sent, STD)
        off = (sent.double() - sums.double()).flatten().numpy() / STD
        assert kstest(off, "norm").pvalue > 1e-6
        assert abs(np.corrcoef(off, sums.flatten().numpy())[0, 1]) < FIVE / math.sqrt(off.size)


def test_the_fast_way_is_the_obvious_one_with_the_same_bits(monkeypatch):
    """Box and Muller's formula in Python's own float64, number by number, on the very bits that were drawn."""
    bits = os.urandom(16 * 50)
    monkeypatch.setattr(entropy.ssl, "RAND_bytes", lambda count: bits[:count])
    sums = torch.randn(1, 100)
    sent = sums.clone()
    Secret(CPU).source("noise").add_noise(sent, STD)
    grid = grid_of(STD)
    words = np.frombuffer(bits, dtype=np.int64)
    for i in range(50):
        angle, radius = int(words[i]), int(words[50 + i])
        length = math.sqrt(-2 * math.log((abs(radius) + 0.5) / 2**63)) * math.copysign(1, radius)
        pair = length * math.sin(math.pi * angle / 2**64), length * math.cos(math.pi * angle / 2**64)
        for place, value in zip((i, 50 + i), pair, strict=True):
            assert float(sent[0, place]) == round((float(sums[0, place]) + STD * value) / grid) * grid


def test_no_length_is_left_unset(recwarn):
    """Parts that are shorter than the space for them: what lies behind is nobody's, and nobody computes with it."""
    for numbers in (1, 2, 3, 17, 2 * entropy.PAIRS_AT_ONCE + 1, 4 * entropy.PAIRS_AT_ONCE - 1):
        assert np.isfinite(noise(numbers)).all()
    assert not recwarn.list


def test_chacha20_is_that_of_rfc_8439():
    """Its section 2.3.2: key 00 01 .. 1f, counter 1, nonce 000000090000004a00000000."""
    state = torch.zeros(16, 1, dtype=torch.int64)
    state[:4, 0] = torch.tensor(chacha.CONSTANTS)
    state[4:12, 0] = torch.from_numpy(np.frombuffer(bytes(range(32)), dtype=np.uint32).astype(np.int64))
    state[12:, 0] = torch.tensor([1, 0x09000000, 0x4A000000, 0])
    block = ((chacha.permuted(state) + state) & chacha.MASK).flatten().tolist()
    wanted = (
        "e4e7f110 15593bd1 1fdd0f50 c47120a3 c7f4d1c7 0368c033 9aaa2204 4e6cd4c3 "
        "466482d2 09aa9f07 05d7c214 a2028bd9 d19c12b5 b94e16de e883d0cb 4e3c50a2"
    )
    assert " ".join(f"{word:08x}" for word in block) == wanted


def test_words_are_blocks_under_a_counter_and_a_nonce():
    key = torch.arange(8, dtype=torch.int32)
    found = chacha.words(key, torch.tensor([5], dtype=torch.int32), 2, 7, 3)
    for block in range(3):
        state = torch.tensor([*chacha.CONSTANTS, *range(8), block, 7, 5, 2])[:, None]
        assert torch.equal(found[block], ((chacha.permuted(state) + state) & chacha.MASK).flatten())


def test_no_two_draws_of_a_run_share_bits():
    secret, found = keyed(), []
    for t in range(3):
        secret.begin(t, again=True)
        for what in entropy.PRIVATE:
            source = secret.source(what)
            found += [source._bits(16) for _ in range(3)]
    words = torch.cat(found)
    assert len(words.unique()) == len(words)
    other = keyed().source("batch")._bits(16)
    assert not set(other.tolist()) & set(words.tolist())


def test_a_round_that_is_played_again_on_a_device_draws_the_same():
    secret = keyed()
    found = []
    for t in (4, 4, 5):
        secret.begin(t, again=True)
        found.append([secret.source("publish").uniform(5, 7) for _ in range(2)])
    assert all(torch.equal(first, again) for first, again in zip(*found[:2], strict=True))
    assert not torch.equal(found[0][0], found[0][1])  # who asks twice in a round gets other numbers
    assert not torch.equal(found[0][0], found[2][0])


@pytest.mark.parametrize("secret", [Secret(CPU), keyed()], ids=["openssl", "chacha20"])
def test_uniforms_are_uniform_and_below_1(secret):
    drawn = secret.source("batch").uniform(400, 500)
    assert drawn.dtype == torch.float64
    assert 0 <= drawn.min() < drawn.max() < 1
    assert kstest(drawn.flatten().numpy(), "uniform").pvalue > 1e-6
    assert (drawn * 2**53 == (drawn * 2**53).round()).all()
    assert (drawn * 2**52 != (drawn * 2**52).round()).any()  # all 53 bits are used


def test_a_cpus_secret_draws_never_repeat():
    sources = [Secret(CPU).source("noise"), Secret(CPU).source("noise")]
    drawn = [source.uniform(8) for source in (*sources, *sources)]
    assert len(torch.cat(drawn).unique()) == 32


def test_nothing_of_a_secret_can_be_saved():
    for thing in (Secret(CPU), keyed()):
        with pytest.raises(TypeError, match="cannot be saved or sent"):
            pickle.dumps(thing)
    assert "key" not in repr(keyed())


def test_stage_one_refuses_secret_noise_as_often_as_research_noise():
    """Of 3,000 uploads of noise alone each; a test at the 5 % level refuses some."""
    n, d = 3000, 2410
    secret, research = torch.zeros(n, d), torch.empty(n, d).normal_(0, STD, generator=torch.Generator().manual_seed(1))
    Secret(CPU).source("noise").add_noise(secret, STD)
    low, high = norm_interval(d, STD, 3.0)
    shares = [
        float((ks_rejects(rows, STD, 0.05) | (rows.norm(dim=1) < low) | (rows.norm(dim=1) > high)).float().mean())
        for rows in (secret, research)
    ]
    spread = math.sqrt(2 * shares[1] * (1 - shares[1]) / n)
    assert 0 < shares[0] < 0.1
    assert abs(shares[0] - shares[1]) < 5 * spread


def test_the_slack_is_small_and_grows_with_the_numbers_that_leave():
    few, many = slack(2_410 * 300), slack(25_450 * 1500)
    assert 0 < few[0] < many[0] < 1e-4
    assert 0 < few[1] < many[1] < 1e-7
