"""Data of your own: one array of examples and one of labels for each hospital, of unlike sizes.

    python examples/own_hospitals.py

Put yours in the place of `patients_of`. Frames, tables and folders come in too: `noisegate run --data FOLDER`.
"""

import numpy as np

import noisegate
from noisegate import Compute, Dataset, Spec

SIZES = {"Northfield": 60, "St. Mary": 150, "Lakeside": 400, "County": 900, "University": 2000}


def patients_of(size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(size, 8) measurements, scaled to about 1, and whether each patient came back."""
    x = rng.normal(size=(size, 8)).astype("float32")
    risk = x @ [0.8, 1.0, -0.6, -0.8, 1.2, 0.3, 0.5, 0.9] + rng.normal(size=size)
    return x, (risk > 1).astype(int)


if __name__ == "__main__":
    rng = np.random.default_rng(1)
    data = Dataset.of_workers({name: patients_of(size, rng) for name, size in SIZES.items()}, name="hospitals")
    # The server holds 20 examples of each class itself. Nobody attacks: `byzantine` is 0.
    spec = Spec(dataset="hospitals", epsilon=2.0, byzantine=0.0, auxiliary=20)
    result = noisegate.run(spec, dataset=data, compute=Compute(device="cpu", threads=1))
    print(f"accuracy {result.accuracy:.3f} at epsilon {result.epsilon:.2f} for every patient")
    for name, accuracy in result.worker_accuracy.items():
        print(f"{name:10}  {accuracy:.3f} on its own test patients")
