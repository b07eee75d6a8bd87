"""Milliseconds per round: the fast way, the same round with vmap, and the floor that no round can go below.

    make bench
    python benchmarks/round.py --model cnn --honest 20 --byzantine 30 --threads 1 --rounds 30

The floor is what any private round must do at least: draw the noise of all uploads once, and take one plain gradient
of the same examples. All are measured in turns in the same process, so that their ratios survive a noisy machine; the
numbers are medians. Data are random: time does not depend on what the pictures show.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import noisegate
from noisegate.lab.setup import prepare
from noisegate.simulate import Federation, first_state, play
from noisegate.views import Worker
from noisegate.workers import per_example_gradients

SHAPES = {"mlp": (1, 28, 28), "cnn": (1, 28, 28)}
EXAMPLES = 1000
"""Held by each worker; only the draw of batches takes time in proportion."""


def federation(model: str, honest: int, byzantine: int, aggregator: str) -> Federation:
    """A federation of random pictures in which everyone computes."""
    rng = noisegate.stream(0, "benchmark")
    x = torch.randn(honest * EXAMPLES + 20, *SHAPES[model], generator=rng)
    y = torch.arange(len(x)) % 10
    dataset = noisegate.Dataset("random", x, y, x[:20], y[:20], 10)
    spec = noisegate.Spec(
        model=model,
        workers=honest,
        byzantine=byzantine / (honest + byzantine),
        attack="label-flip",
        aggregator=aggregator,
        rounds=10**6,
        sigma=60.0,  # the accountant's answer for so many rounds is of no interest here
        sigma_base=60.0,
        epsilon=1e3,
        accountant="rdp",
    )
    return prepare(spec, noisegate.Compute(), dataset).federation


def floor(run: Federation) -> Callable[[int], None]:
    """Noise for everyone, and one plain gradient of as many examples."""
    params = run.model.initial()
    count = run.batch * len(run.byzantine)
    x, y = run.x[:count], run.y[:count]
    noise = params.new_empty(len(run.byzantine), len(params))

    def one(t: int) -> None:
        noise.normal_(0.0, 1.0, generator=noisegate.stream(0, "noise", t, params.device))
        weights = params.detach().requires_grad_()
        torch.autograd.grad(run.model.losses(weights, x, y).mean(), weights)

    return one


def rounds_of(run: Federation) -> Callable[[int], None]:
    """Rounds of training, one after the other."""
    state = first_state(run)

    def one(t: int) -> None:
        nonlocal state
        state, _ = play(run, state, t)

    return one


def by_vmap(run: Federation, chunk: int = 128) -> Federation:
    """The same federation with every example's gradient made by vmap: what one would write by hand, in float32."""

    def sums(worker: Worker, params: Tensor, x: Tensor, y: Tensor, owner: Tensor, last: Tensor) -> Tensor:
        total = torch.zeros_like(last)
        for part in torch.arange(len(y)).split(chunk):
            gradients = per_example_gradients(run.model, params, x[part], y[part])
            mixed = (1 - worker.momentum) * gradients + worker.momentum * last[owner[part]]
            total.index_add_(0, owner[part], mixed * worker.weights(mixed.norm(dim=1, keepdim=True)))
        return total

    return replace(run, sums=sums)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="mlp")
    parser.add_argument("--honest", type=int, default=20)
    parser.add_argument("--byzantine", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)

    filtered = federation(chosen.model, chosen.honest, chosen.byzantine, "two-stage")
    open_door = federation(chosen.model, chosen.honest, chosen.byzantine, "mean")
    ways = {
        "floor: noise + one plain gradient": floor(filtered),
        "two-stage": rounds_of(filtered),
        "mean": rounds_of(open_door),
        "two-stage, gradients by vmap": rounds_of(by_vmap(filtered)),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for t in range(chosen.rounds + 2):
        for name, one in ways.items():
            began = time.perf_counter()
            one(t)
            times[name].append(1e3 * (time.perf_counter() - began))

    print(
        f"{chosen.model}, {filtered.model.d:,} parameters, {len(filtered.byzantine)} workers x {filtered.batch} "
        f"examples, {chosen.threads} thread(s), torch {torch.__version__}, {chosen.rounds} rounds"
    )
    median = {name: statistics.median(found[2:]) for name, found in times.items()}  # the first two warm up
    base = median["floor: noise + one plain gradient"]
    print("| round | ms | times the floor |\n| --- | ---: | ---: |")
    for name, value in median.items():
        print(f"| {name} | {value:.1f} | {value / base:.1f} |")
    ratio = median["two-stage, gradients by vmap"] / median["two-stage"]
    print(f"two-stage is {ratio:.1f} times faster than the same round with vmap")


if __name__ == "__main__":
    main()
