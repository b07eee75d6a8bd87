"""The aggregator `fortified`: tests of what an honest upload is, and weights by the odds of being honest."""

from noisegate.aggregators.fortified.rule import Fortified

__all__ = ["Fortified"]
