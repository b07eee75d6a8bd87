"""A transport in one page: five workers in threads, two of which flip their labels, and a server that waits a while.

    python examples/threads.py

A transport moves bytes and keeps time. Everything else is `noisegate.protocol`: a worker calls `upload_of_one`, the
server calls `judge` with one entry for each worker, None for whoever was too slow. Queues stand for the network here.
"""

import queue
import sys
import threading
import time

import torch

from noisegate import FlatModel, Fortified, Normalized, Poisson, calibrate, stream
from noisegate.data import hold_out, load
from noisegate.entropy import Secret
from noisegate.models import build_model
from noisegate.protocol import Mechanism, Server, first_state, judge, upload_of_one

WORKERS, FLIPPERS, PATIENCE = 5, 2, 10.0  # the last: seconds that the server waits for the uploads of a round
DECLARED = 280  # a public number of examples, about as many as each worker holds
ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 150

digits = load("digits")
own, rest = hold_out(digits.y, digits.classes, 2, stream(1, "auxiliary"))  # two examples of each class for the server
parts = rest[torch.randperm(len(rest), generator=stream(1, "partition"))].chunk(WORKERS)
examples = [(digits.x[part], 9 - digits.y[part] if i < FLIPPERS else digits.y[part]) for i, part in enumerate(parts)]
model = FlatModel(build_model("mlp", digits.shape, digits.classes, stream(1, "weights")))
sigma = calibrate(4.0, examples=DECLARED, rounds=ROUNDS, sampling=Poisson(48), delta=1e-4)
mechanism = Mechanism.of(model, examples[0], Normalized(momentum=0.1), Poisson(48), sigma, declared=DECLARED)
uploads, models = queue.Queue(), [queue.Queue() for _ in range(WORKERS)]


def work(number: int) -> None:
    """One worker: gets (round, model) until there is none, and sends (round, number, upload)."""
    secret, last = Secret(torch.device("cpu")), None
    while (received := models[number].get()) is not None:
        t, params = received
        secret.begin(t)
        last = upload_of_one(mechanism, params, *examples[number], last, secret.source)
        uploads.put((t, number, last))


threads = [threading.Thread(target=work, args=(number,)) for number in range(WORKERS)]
for thread in threads:
    thread.start()
server = Server(mechanism, Fortified(), digits.x[own], digits.y[own], WORKERS, WORKERS - FLIPPERS, rate=0.5)
state, weights = first_state(server, model.initial()), torch.zeros(WORKERS)
for t in range(ROUNDS):
    for each in models:
        each.put((t, state.params))
    arrived, deadline = [None] * WORKERS, time.monotonic() + PATIENCE
    try:
        while any(upload is None for upload in arrived):
            about, number, upload = uploads.get(timeout=max(0.0, deadline - time.monotonic()))
            arrived[number] = upload if about == t else arrived[number]  # one of an earlier round is late
    except queue.Empty:
        print(f"round {t}: {arrived.count(None)} uploads are missing")
    verdict, state = judge(server, state, arrived, ties=torch.randperm(WORKERS))
    weights += verdict.weights / ROUNDS
for each, thread in zip(models, threads, strict=True):
    each.put(None)
    thread.join()
right = (model.outputs(state.params, digits.x_test).argmax(1) == digits.y_test).float().mean()
print(f"accuracy {right:.3f}, mean weight of each worker {[round(float(weight), 3) for weight in weights]}")
