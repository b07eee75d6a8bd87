"""How the uploads of most workers become private."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor


class Private:
    """Gaussian noise on the sum of bounded contributions, sent as that is. A base: it lacks the rest of a `Worker`."""

    mechanism: ClassVar[str] = "gaussian"

    def publish(self, sent: Tensor, last: Tensor, sigma: float, stream: Callable[[], torch.Generator]) -> None:
        """Sends its mean as it is."""

    def noise_in_upload(self, added: float, sigma: float, d: int) -> float:
        """What was added."""
        return added
