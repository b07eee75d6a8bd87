"""What people are told of their own data: not wrong, and rarely meant."""

import warnings

from noisegate.checks import plain
from noisegate.data.dataset import Dataset
from noisegate.errors import NoisegateWarning

LARGEST, APART = 50.0, 100.0
"""Features beyond the first, or whose spreads differ by more than the second factor, are hinted at."""

PUBLIC = (
    "bring them to about -1 to 1 by constants that everyone may know, such as the bounds that their unit allows; means "
    "and deviations of the data themselves are private, and to use them costs privacy that no epsilon counts"
)


def warn_of_scale(where: object, dataset: Dataset) -> None:
    """Warn where features are far larger than 1, or than one another."""
    if hint := of_scale(dataset):
        warnings.warn(f"{plain(where)}: {hint}", NoisegateWarning, stacklevel=2)


def of_scale(dataset: Dataset) -> str | None:
    """A hint where features are far larger than 1, or than one another; None where they are not."""
    if dataset.x.ndim != 2:
        largest = float(dataset.x.abs().max())
        return f"x has values up to {largest:g}: {PUBLIC}" if largest > LARGEST else None
    low, high = dataset.x.amin(0), dataset.x.amax(0)
    size, spread = low.abs().maximum(high.abs()), high - low
    worst = int(size.argmax())
    if float(size[worst]) > LARGEST:
        return f"{_called(dataset, worst)} goes up to {float(size[worst]):g}: features learn badly so; {PUBLIC}"
    some = spread > 0
    if not bool(some.any()):
        return None
    widest, narrowest = int(spread.argmax()), int(spread.where(some, spread.max()).argmin())
    if float(spread[widest]) <= APART * float(spread[narrowest]):
        return None
    return (
        f"{_called(dataset, widest)} spreads over {float(spread[widest]):.3g}, and {_called(dataset, narrowest)} over "
        f"{float(spread[narrowest]):.3g}, which will hardly be learned from; {PUBLIC}"
    )


def _called(dataset: Dataset, feature: int) -> str:
    return f"feature {plain(dataset.feature_names[feature])!r}" if dataset.feature_names else f"feature {feature}"
