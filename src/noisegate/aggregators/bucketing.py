"""Bucketing (Karimireddy, He and Jaggi, 2022)."""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from noisegate import checks
from noisegate.aggregators.geometric_median import GeometricMedian
from noisegate.aggregators.robust import verdict_of
from noisegate.aggregators.wrapper import INNER_NEEDS, Wrapper
from noisegate.roles import Aggregator, Number
from noisegate.vectors import counting, finite_rows
from noisegate.views import ServerView, State, Verdict


@dataclass(frozen=True)
class Bucketing(Wrapper):
    """Average random buckets of uploads, then any aggregator on the averages.

    The averages differ less than the uploads. f Byzantine workers spoil at most f buckets, so it admits as many as the
    aggregator admits among ceil(n / size) uploads; an aggregator without a limit admits any number. Where `size` does
    not divide n, the last bucket is smaller. Buckets are made of those uploads that arrived well-formed. An upload's
    weight is its share of its bucket, times the weight that the aggregator gives to that bucket.

    aggregator: what judges the averages. Their noise has standard deviation s / sqrt(size). Workers change their
        buckets in every round, so a state of its own follows none of them.
    size: uploads in a bucket.
    score: what the aggregator gives to an upload's bucket.
    """

    needs: ClassVar[str] = f"for ceil(n / size) averages, f of them spoiled, {INNER_NEEDS}"
    aggregator: Aggregator = field(default_factory=GeometricMedian)
    size: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.count(size=self.size)

    def check(self, workers: int, f: int | None = None) -> None:
        """As for every wrapper; and one bucket may not hold them all."""
        if self.size >= workers > 1:
            raise checks.refuse("size", self.size, f"must be below the {workers} workers, or all share a bucket")
        super().check(workers, f)

    def rows(self, workers: Number) -> Number:
        """As many as there are buckets."""
        return -(-workers // self.size)

    def __call__(self, view: ServerView, state: State) -> Verdict:
        member = buckets(view, self.size)
        means = averages(view.uploads, member, self.size)
        number = len(means)
        rows, norms, formed = finite_rows(means)
        seen = replace(
            view,
            uploads=rows,
            norms=norms,
            present=formed & member.any(1),
            noise_std=view.noise_std / math.sqrt(self.size),
            believed_honest=max(1, number - self.reckoned(len(view.present), view.believed_honest)),
            ties=counting(number, means.device),  # the buckets are in random order already
            missing=None if view.missing is None else ~member.any(1),
        )
        verdict = self.aggregator(seen, state)
        kept = (member & verdict.kept[:, None]).any(0)
        score = torch.where(member, verdict.score[:, None], 0.0).sum(0)
        composed = verdict.weights.double() @ shares(member)
        found = verdict_of(view, verdict.update, kept, score, verdict.state, composed)
        return replace(found, fell_back=verdict.fell_back)


def buckets(view: ServerView, size: int) -> Tensor:
    """(m, n) who is in which bucket: `size` well-formed uploads after another in the order of `ties`.

    m is the number that all workers' uploads together would fill, so that the last ones may be empty.
    """
    n = len(view.ties)
    before = view.present[view.ties].cumsum(0) - 1
    bucket = torch.empty_like(before).scatter_(0, view.ties, before.div(size, rounding_mode="floor"))
    return (counting(-(-n // size), before.device)[:, None] == bucket) & view.present


def averages(uploads: Tensor, member: Tensor, size: int) -> Tensor:
    """(m, d) the means of the marked uploads of each row of (m, n), of which there are `size` at most.

    What `shares(member) @ uploads` gives, many times faster, since most of those products are with zero.
    """
    there, who = member.to(uploads.dtype).topk(min(size, member.shape[1]), dim=1)
    weights = there / there.sum(1, keepdim=True).clamp(min=1)  # before it is added up
    return embedding_bag(who, uploads, per_sample_weights=weights, mode="sum")


def shares(member: Tensor) -> Tensor:
    """(m, n) in float64, the weights that make means of the marked entries of each row; an empty row stays zero."""
    return member.double() / member.sum(1, keepdim=True).clamp(min=1)
