"""What to tell people of an aggregator that fell back."""

WHY = {"fortified": "the server's examples disagree with most workers; see docs/fortified.md"}
"""What it means that an aggregator fell back, by its name."""

UNKNOWN = "what it takes for granted did not hold"


def told(aggregator: str, share: float, rounds: int) -> str:
    """The sentence that says in how many rounds an aggregator fell back, and why; empty if it never did.

    share: of the rounds that were judged, which are `rounds`.
    """
    if share <= 0:
        return ""
    return f"the aggregator fell back in {round(share * rounds)} of {rounds} rounds: {WHY.get(aggregator, UNKNOWN)}"
