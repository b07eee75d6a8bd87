"""How the uploads of most workers become private."""

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from noisegate.entropy import Randomness
from noisegate.errors import SpecError


class Private:
    """Gaussian noise on the sum of bounded contributions, sent as that is. A base: it lacks the rest of a `Worker`."""

    mechanism: ClassVar[str] = "gaussian"
    noisy: ClassVar[bool] = True
    fresh: ClassVar[bool] = True
    """Whether the noise of an upload is independent of every earlier one's."""

    def publish(self, sent: Tensor, last: Tensor, sigma: float, stream: Callable[[], Randomness]) -> None:
        """Sends its mean as it is: that has its noise already."""
        if self.mechanism != "gaussian":
            raise SpecError(f"worker: its mechanism is {self.mechanism!r}, but it has no `publish` of its own for it")

    def noise_in_upload(self, added: float, sigma: float, d: int) -> float:
        """What was added."""
        return added
