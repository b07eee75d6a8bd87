"""A transport in one file: five workers in threads, two of which flip their labels, and a server that waits a while.

    python examples/threads.py

A transport moves bytes and keeps time. Everything else is `noisegate.protocol`: a worker calls `upload_of_one`, the
server calls `judge` with one entry for each worker, None for whoever was too slow. Here queues stand for the network.
"""

import os
import queue
import threading

import torch

from noisegate import Fortified, Normalized, Poisson, calibrate
from noisegate.data import load
from noisegate.entropy import Secret
from noisegate.models import build_model
from noisegate.protocol import Mechanism, Server, first_state, judge, upload_of_one
from noisegate.streams import stream
from noisegate.vectors import FlatModel

WORKERS, FLIPPERS, ROUNDS, PATIENCE = 5, 2, int(os.environ.get("ROUNDS", 100)), 10.0
"""PATIENCE: seconds that the server waits for uploads of a round."""

digits = load("digits", stream(1, "test-split"))
parts = torch.arange(len(digits.y)).split(len(digits.y) // (WORKERS + 1))  # the last part has the server's examples
examples = [(digits.x[part], digits.y[part]) for part in parts[:WORKERS]]
for i in range(FLIPPERS):
    examples[i] = examples[i][0], 9 - examples[i][1]
model = FlatModel(build_model("mlp", digits.shape, digits.classes, stream(1, "weights")))
sigma = calibrate(8.0, examples=len(parts[0]), rounds=ROUNDS, sampling=Poisson(32), delta=1e-5)
mechanism = Mechanism.of(model, examples[0], Normalized(momentum=0.1), Poisson(32), sigma)


def work(number: int, models: queue.Queue, uploads: queue.Queue) -> None:
    """One worker: receives (round, model) until there is none, sends (round, number, upload)."""
    secret, last = Secret(torch.device("cpu")), None
    while (received := models.get()) is not None:
        t, params = received
        secret.begin(t)
        last = upload_of_one(mechanism, params, *examples[number], last, secret.source)
        uploads.put((t, number, last))


uploads, models = queue.Queue(), [queue.Queue() for _ in range(WORKERS)]
for number in range(WORKERS):
    threading.Thread(target=work, args=(number, models[number], uploads), daemon=True).start()
order = [int(i) for label in range(10) for i in (digits.y[parts[-1]] == label).nonzero().flatten()[:2]]
own = digits.x[parts[-1][order]], digits.y[parts[-1][order]]
server = Server(mechanism, Fortified(), *own, workers=WORKERS, believed_honest=WORKERS - FLIPPERS, rate=0.2)
state, weights = first_state(server, model.initial()), torch.zeros(WORKERS)
for t in range(ROUNDS):
    for each in models:
        each.put((t, state.params))
    arrived = [None] * WORKERS
    try:
        while any(upload is None for upload in arrived):
            about, number, upload = uploads.get(timeout=PATIENCE)
            if about == t:  # else it is late
                arrived[number] = upload
    except queue.Empty:
        print(f"round {t}: {sum(upload is None for upload in arrived)} uploads are missing")
    verdict, state = judge(server, state, arrived, ties=torch.randperm(WORKERS))
    weights += verdict.weights
for each in models:
    each.put(None)
right = (model.outputs(state.params, digits.x_test).argmax(1) == digits.y_test).float().mean()
print(f"accuracy {right:.3f}; mean weight of each worker: {[round(float(w) / ROUNDS, 3) for w in weights]}")
