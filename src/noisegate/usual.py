"""Usual values that the help of a command tells before anything else is imported."""

BUDGET = 72
"""Runs of a red team's search. It suffices to screen the catalog twice and to improve the worst attacks."""

SHARES = (0.2, 0.4, 0.6, 0.9)
"""Byzantine shares at which a red team tries the worst attacks too."""

PAPER_SEEDS = (1, 2, 3)
"""The seeds of an experiment of the paper."""

QUICK_SEEDS = (1, 2, 3, 4)
"""Seeds of the subset on digits. It has 360 test examples, so that single runs are noisy."""

PAPER_AGGREGATOR = "two-stage"
"""The paper's own aggregator."""

DAYS = 365
"""How long a certificate is valid."""
