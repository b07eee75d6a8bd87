"""What is said where something was surely meant in another way, and numbers that are too small for their places."""

import warnings
from dataclasses import replace

import pytest

from noisegate import Compute, Spec, run
from noisegate.checks import guess, rounded
from noisegate.errors import NoisegateWarning, SpecError

CPU = Compute(device="cpu", threads=1)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"dataset": "MNIST"}, "mnist"),
        ({"dataset": "Digits"}, "digits"),
        ({"dataset": "FASHIO"}, "fashion"),
        ({"attack": "LABEL-FLIP"}, "label-flip"),
        ({"attack": "Label_Flip"}, "label-flip"),
        ({"attack": "label flip"}, "label-flip"),
        ({"aggregator": "Two-Stage"}, "two-stage"),
        ({"aggregator": "Krumm"}, "krum"),
        ({"worker": "Normalised"}, "normalized"),
        ({"model": "CNN"}, "cnn"),
    ],
)
def test_the_case_of_a_name_is_no_riddle(given, meant):
    with pytest.raises(SpecError, match=f"did you mean {meant!r}"):
        run(Spec(**given), compute=CPU)


def test_what_is_like_nothing_is_not_guessed():
    assert guess("nosuch", ["digits", "mnist"]) == ""
    assert guess(7, ["seven"]) == ""
    assert guess("DIGITS", ["digits"]) == " (did you mean 'digits'?)"


@pytest.mark.parametrize(("share", "meant"), [(60, "0.6"), (2.5, "0.025"), (99, "0.99")])
def test_a_percentage_is_told_as_a_share(cli, share, meant):
    told = f"byzantine = {float(share)}: must be at least 0 and below 1 (did you mean {meant}?)"
    assert cli("run", "--byzantine", share).err == f"noisegate: {told}\n"
    with pytest.raises(SpecError, match=r"gamma = .*did you mean"):
        Spec(gamma=float(share))


@pytest.mark.parametrize("share", [1.0, -0.1, 100.0, 250.0, float("nan")])
def test_what_is_no_percentage_is_not_guessed(share):
    with pytest.raises(SpecError) as refused:
        Spec(byzantine=share)
    assert "did you mean" not in str(refused.value)


@pytest.mark.filterwarnings("default")
def test_less_than_one_attacker_is_a_warning(quick, cli):
    spec = quick(workers=5, byzantine=0.05)
    with pytest.warns(NoisegateWarning, match=r"byzantine = 0.05: is less than one worker beside 5 honest ones"):
        assert run(spec, compute=CPU).byzantine_workers == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(replace(spec, byzantine=0.1), compute=CPU).byzantine_workers == 1, "as the warning says"
        run(replace(spec, byzantine=0.0), compute=CPU)
    line = ("--rounds", 3, "--sigma", 2.5, "--epsilon", 2, "--workers", 5, "--byzantine", 0.05, "--device", "cpu")
    answer = cli("run", *line, "--threads", 1)
    assert (answer.status, answer.err.count("nobody attacks")) == (0, 1)
    assert "noisegate: warning: byzantine = 0.05" in answer.err
    assert "give 0.1 or more, or more workers" in answer.err


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0.0, "0.000"),
        (0.0004, "0.0004"),
        (0.00049999, "0.0005"),
        (0.0005, "0.001"),
        (1.23456, "1.235"),
        (3e-9, "3e-09"),
    ],
)
def test_a_number_above_0_never_prints_as_0(number, shown):
    assert rounded(number, 3) == shown
    assert (float(rounded(number, 3)) == 0) is (number == 0)


def test_an_epsilon_that_is_tiny_prints_as_it_is(cli):
    line = ("--samples", 3000, "--batch", 1, "--rounds", 3, "--sigma", 100, "--delta", 1e-9)
    told = cli("privacy", *line).out.splitlines()[0].split()
    assert 1e-6 < float(told[told.index("epsilon") + 1]) < 5e-5
