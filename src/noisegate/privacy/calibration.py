"""How much noise a budget asks for: a root of the accountant's epsilon, found from the safe side."""

import math
from functools import lru_cache

from noisegate.errors import PrivacyError
from noisegate.privacy.pricing import MOST_NOISE, Ask, spent_by

SMALLEST, LARGEST = 0.05, MOST_NOISE  # the noise multipliers that calibration looks at
KEEP, AIM = 0.999, 0.9995  # calibration stops when this share of the budget is spent; what it aims at


@lru_cache(maxsize=1024)
def noise_for(ask: Ask, budget: float) -> float:
    if ask.accountant == "rdp":
        return _solve(ask, budget, 1.0, coarse=1.0)
    return _solve(ask, budget, _solve(ask, budget, 1.0, coarse=10.0), coarse=1.0)


def _solve(ask: Ask, budget: float, start: float, coarse: float) -> float:
    """A noise multiplier that spends between KEEP * budget and budget, sought from `start`, in logarithms.

    If epsilon jumps over that range, the smallest multiplier found on the safe side of the jump.
    """
    over: tuple[float, float] | None = None  # (log sigma, log epsilon) of the largest noise seen to overspend
    safe: tuple[float, float] | None = None  # and of the smallest seen not to
    x = math.log(start)
    for step in range(200):
        spent = spent_by(ask, math.exp(x), coarse)
        if KEEP * budget <= spent <= budget:
            return math.exp(x)
        point = x, math.log(spent) if spent > 0 else -math.inf
        over, safe = (point, safe) if spent > budget else (over, point)
        if over is None and x <= math.log(SMALLEST):
            raise PrivacyError(
                f"epsilon = {budget:g} asks for no privacy: a noise multiplier of {SMALLEST:g} does not "
                f"spend it ({ask}). Ask for a smaller epsilon"
            )
        if safe is None and x >= math.log(LARGEST):
            raise PrivacyError(
                f"epsilon = {budget:g} cannot be met: a noise multiplier of {LARGEST:g} overspends it "
                f"({ask}). Allow a larger epsilon or delta, or fewer rounds"
            )
        if over and safe and safe[0] - over[0] < 1e-9:
            return math.exp(safe[0])
        x = _next(over, safe, math.log(AIM * budget), bisect=step % 4 == 3)
    raise PrivacyError(f"epsilon = {budget:g}: calibration did not settle ({ask}); ask for another epsilon")


def _next(over: tuple[float, float] | None, safe: tuple[float, float] | None, aim: float, bisect: bool) -> float:
    """Where to look next: log epsilon falls almost linearly in log sigma, by 1 or more for 1.

    A secant inside the bracket, bisected now and then to bound the worst case; without a bracket a step that
    should reach the other side.
    """
    if over and safe:
        if bisect or math.isinf(over[1]) or math.isinf(safe[1]):
            return (over[0] + safe[0]) / 2
        return over[0] + (safe[0] - over[0]) * (over[1] - aim) / (over[1] - safe[1])
    x, spent = over or safe or (0.0, aim)
    wanted = x + max(-math.log(4), min(spent - aim, math.log(4)))
    return max(math.log(SMALLEST), min(wanted, math.log(LARGEST)))
