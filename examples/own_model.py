"""A model of your own: a backbone that was trained on public data and is frozen, and a head that is trained privately.

    python examples/own_model.py

The handwritten digits 0 to 4 are public here, and the backbone learns from them as usual. The digits 5 to 9 are
private: five workers hold them, and five more label theirs wrongly. Only what is not frozen is trained on them, made
private and sent. The same network without public data, all of it trained privately, stands beside it.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import noisegate
from noisegate import Compute, Dataset, Spec

CHANNELS = 16
FEATURES = CHANNELS * 4 * 4


def backbone(norm: nn.Module) -> nn.Module:
    """(B, 1, 8, 8) pictures to (B, FEATURES)."""
    return nn.Sequential(nn.Conv2d(1, CHANNELS, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())


def head() -> list[nn.Module]:
    """(B, FEATURES) to a score for each of five classes."""
    return [nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 5)]


def pretrained(x: torch.Tensor, y: torch.Tensor) -> nn.Module:
    """A frozen backbone, after 40 ordinary steps on public examples with some noise in the pictures."""
    frozen = backbone(nn.BatchNorm2d(CHANNELS))  # what is frozen may have BatchNorm, and nothing else may
    model = nn.Sequential(frozen, nn.Linear(FEATURES, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x + 0.3 * torch.randn_like(x)), y).backward()
        optimizer.step()
    return frozen.requires_grad_(False)


if __name__ == "__main__":
    torch.manual_seed(1)
    digits = load_digits()
    x = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    public = y < 5
    private = Dataset.of(x[~public], y[~public] - 5, name="five-to-nine")
    models = {
        "frozen backbone": nn.Sequential(pretrained(x[public], y[public]), *head()),
        "all trained": nn.Sequential(backbone(nn.GroupNorm(4, CHANNELS)), *head()),
    }
    spec = Spec(dataset="five-to-nine", epsilon=2.0, workers=5, byzantine=0.5)
    for name, model in models.items():
        result = noisegate.run(spec, dataset=private, model=model, compute=Compute(device="cpu", threads=1))
        print(
            f"{name:15}  accuracy {result.accuracy:.3f} at epsilon {result.epsilon:.2f}, "
            f"{result.parameters} parameters trained, {result.frozen} frozen"
        )
