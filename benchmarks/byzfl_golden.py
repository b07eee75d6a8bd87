"""What ByzFL's aggregators and attacks answer on fixed vectors, for tests/test_byzfl_golden.py.

    pip install --no-deps byzfl==0.0.11
    python benchmarks/byzfl_golden.py

Writes tests/golden/byzfl.npz. The vectors are float32 numbers; ByzFL gets them as numpy arrays in float64, in which it
then computes. The file is the same to the byte each time it is made with the same versions.
"""

import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FILE = Path(__file__).parent.parent / "tests" / "golden" / "byzfl.npz"

BYZFL = "0.0.11"
NU, STEPS, TAU, RADIUS, DEVIATION, BUCKET = 0.1, 3, 2.0, 3.0, 1.5, 2

Vectors = NDArray[np.float64]


def import_byzfl() -> Any:
    """ByzFL without its training benchmarks: those alone need torchvision, matplotlib and seaborn."""
    sys.modules.setdefault("byzfl.benchmark", types.ModuleType("byzfl.benchmark"))
    import byzfl

    return byzfl


def cases() -> dict[str, tuple[Vectors, int]]:
    """Vectors and f. The last f vectors are lies: far off, all the same and close, or none; two are strange."""
    rng = np.random.default_rng(20180)
    far = rng.normal(0.3, 1.0, (11, 7))
    far[-2:] = [[40.0] * 7, [-25.0, 60.0, 0.0, 0.0, 3.0, -80.0, 9.0]]
    close = rng.normal(0.1, 1.0, (13, 50))
    close[-3:] = close[:-3].mean(0) - 1.2 * close[:-3].std(0)
    strange = rng.normal(0.0, 0.5, (20, 33)) + rng.normal(0.0, 0.5, 33)
    strange[4], strange[11] = 0.0, strange[11] * 1000
    tight = np.random.default_rng(33).normal(0.0, 1.0, (9, 4))  # where one neighbor more changes whom Krum chooses
    found = {"far": (far, 2), "close": (close, 3), "strange": (strange, 4), "tight": (tight, 3)}
    return {name: (rows.astype(np.float32).astype(np.float64), f) for name, (rows, f) in found.items()}


def answers(rows: Vectors, f: int) -> dict[str, Vectors]:
    """By name, what ByzFL makes of the vectors. They are copied for each, since some of its classes write to them."""
    byzfl = import_byzfl()
    clipping = byzfl.CenteredClipping(L=1, tau=RADIUS)  # it starts a call where the last one ended
    ways = {
        "average": byzfl.Average(),
        "median": byzfl.Median(),
        "trimmed-mean": byzfl.TrMean(f),
        "mean-near-median": byzfl.Meamed(f),
        "krum": byzfl.Krum(f),
        "multi-krum": byzfl.MultiKrum(f),
        "geometric-median": byzfl.GeometricMedian(nu=NU, T=STEPS),
        "centered-clipping": clipping,
        "centered-clipping, second call": clipping,
        "centered-clipping, 3 steps": byzfl.CenteredClipping(L=3, tau=RADIUS),
        "mda": byzfl.MDA(f),
        "nnm": byzfl.NNM(f),
        "nnm, trimmed-mean": lambda rows: byzfl.TrMean(f)(byzfl.NNM(f)(rows)),
        "inner": byzfl.InnerProductManipulation(tau=TAU),
        "a-little": byzfl.ALittleIsEnough(tau=DEVIATION),
        "sign-flip": byzfl.SignFlipping(),
        "mimic": byzfl.Mimic(epsilon=3),
    }
    with np.errstate(divide="ignore"):  # clipping divides by the distance of the zero vector from zero
        found = {name: np.asarray(way(rows.copy())) for name, way in ways.items()}
    np.random.seed(7)  # it knows no other source of randomness
    order = np.random.permutation(len(rows))
    np.random.seed(7)
    found["bucketing"] = byzfl.Bucketing(BUCKET)(rows.copy())
    assert np.allclose(found["bucketing"][0], rows[order[:BUCKET]].mean(0)), "it drew another order"
    return found | {"order": order}


def main() -> None:
    assert version("byzfl") == BYZFL, f"byzfl is {version('byzfl')}, not {BYZFL}"
    parts: dict[str, NDArray[Any]] = {}
    for case, (rows, f) in cases().items():
        parts[f"{case}/vectors"], parts[f"{case}/f"] = rows.astype(np.float32), np.array(f)
        parts |= {f"{case}/{name}": value for name, value in answers(rows, f).items()}
    FILE.parent.mkdir(exist_ok=True)
    np.savez_compressed(FILE, **parts)
    print(f"{FILE.name}: {len(parts)} arrays, {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
