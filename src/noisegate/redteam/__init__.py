"""An automatic adversary: the search for the worst attack on one configuration."""

from noisegate.redteam.search import Findings, red_team

__all__ = ["Findings", "red_team"]
