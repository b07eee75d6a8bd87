"""The tests that look at one upload of one round: its length, and the distribution of its coordinates."""

from typing import NamedTuple

from torch import Tensor

from noisegate import kernels
from noisegate.aggregators.ks_test import ks_rejects, room_for_signal
from noisegate.views import ServerView


class FirstTests(NamedTuple):
    """Which uploads passed the first tests: (n,) each.

    fits_length: its length is one that an honest upload has. passes_distribution: its coordinates are distributed like
    noise with a signal. passed: both, and it is present. An upload that did not pass is added to nothing, so that
    a huge one does no harm.
    """

    fits_length: Tensor
    passes_distribution: Tensor
    passed: Tensor

    @classmethod
    def of(cls, view: ServerView, shortest: float, longest: float | Tensor, chance: float) -> "FirstTests":
        """shortest, longest: lengths of an honest upload; longest may be (n,), by the size of the worker.

        chance: that the test of the distribution refuses one.
        """
        rejected = None
        if view.noise_std:
            room = room_for_signal(view.uploads.shape[1], view.noise_std, view.largest)
            rejected = ks_rejects(view.uploads, view.noise_std, chance, view.scratch, room)
        if kernels.fused(view.norms) and isinstance(longest, float):
            from noisegate.aggregators.fortified.kernels import first_tests

            return cls(*first_tests.first_tests(view.norms, view.present, rejected, shortest, longest))
        fits = (view.norms >= shortest) & (view.norms <= longest)
        distributed = view.present if rejected is None else ~rejected
        return cls(fits, distributed, view.present & fits & distributed)
