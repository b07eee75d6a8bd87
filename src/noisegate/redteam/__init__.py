"""An automatic adversary: it searches for the worst attack on one configuration."""

from noisegate.redteam.findings import Findings
from noisegate.redteam.search import red_team

__all__ = ["Findings", "red_team"]
