"""`noisegate privacy`: how much noise a budget needs, or what a noise costs."""

import json
from typing import Annotated

import typer

from noisegate import checks
from noisegate.errors import SpecError
from noisegate.flips import cost_of_sign, flip_probability
from noisegate.privacy import guarantee
from noisegate.sampling import SAMPLINGS


def show_privacy(
    samples: Annotated[int, typer.Option(help="Examples that one worker holds.")],
    rounds: Annotated[int, typer.Option(help="Rounds of training.")],
    batch: Annotated[int, typer.Option(help="Examples that a worker uses per round, on average.")] = 16,
    epsilon: Annotated[float | None, typer.Option(help="Budget: find the noise it needs.")] = None,
    sigma: Annotated[float | None, typer.Option(help="Noise multiplier: find what it costs.")] = None,
    delta: Annotated[float | None, typer.Option(help="Default: samples to the power -1.1.")] = None,
    sampling: Annotated[str, typer.Option(help="poisson or fixed (needs --accountant rdp).")] = "poisson",
    accountant: Annotated[str, typer.Option(help="pld (tight) or rdp (the paper's).")] = "pld",
    signs: Annotated[
        int, typer.Option(help="Signs per upload, each flipped at random, instead of Gaussian noise.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Calibrate the noise for a budget, or price a given noise."""
    checks.one_of(SAMPLINGS, sampling=sampling)
    if (epsilon is None) == (sigma is None):
        raise SpecError("privacy: give either --epsilon, to find the noise, or --sigma, to find its cost")
    found = guarantee(
        examples=samples,
        rounds=rounds,
        sampling=SAMPLINGS[sampling](batch),
        sigma=sigma,
        epsilon=epsilon,
        delta=delta,
        accountant=accountant,
        signs=signs,
    )
    flips = {}
    if signs:
        flips = {"flip_probability": flip_probability(found.sigma, signs), "one_sign": cost_of_sign(found.sigma, signs)}
    if as_json:
        print(json.dumps(found.as_dict() | flips, indent=2))
        return
    print(f"sigma {found.sigma:.4f}   epsilon {found.epsilon:.4f}   delta {found.delta:.3g}")
    print(
        f"one example of one worker, {found.relation}, over {found.rounds} rounds of {found.sampling} sampling at rate "
        f"{found.rate:.4g} ({found.batch} of {found.examples}), by {found.accountant.upper()}"
    )
    if flips:
        print(
            f"{signs} signs a round, each flipped with probability {flips['flip_probability']:.4f}: one sign costs "
            f"{flips['one_sign']:.3g} a round, but an example can turn them all"
        )
