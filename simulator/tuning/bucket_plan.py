"""Bucket plan: the buckets that `tune` has found, beside a bound and the buckets of known rules."""

import os
from typing import Self

from ...reference.files.reading import Schema, read_schema
from ...reference.files.writing import write_atomically
from ...reference.trace import BucketLayout
from .plan_times import CapRule, Objective

DEFAULT = "torch's default"
GIVEN = "the given buckets"
RULE = "rule of three times"


class Baseline(Schema):
    """Buckets by a known rule, and their predicted time."""

    name: str  #: the rule
    iteration_ns: int  #: predicted objective, nanoseconds
    buckets: int  #: number of buckets
    regret: float  #: time of this rule over that of the plan, minus one, a fraction


class BucketPlan(Schema):
    """Buckets for one model, fabric and world size; all times are predicted, in nanoseconds.

    The time of torch's default is among `baselines`, under the name `DEFAULT`. If the policy gave caps or a plan,
    their time is there too, under the name `GIVEN`, and takes the place of the default's in `gain` and
    `keep_default`.
    """

    model: str  #: name of the model in the trace
    parameters: tuple[str, ...]  #: names of the parameters, by parameter index
    world_size: int  #: number of ranks
    objective: Objective  #: statistic of the iteration time that is short, a name
    buckets: BucketLayout  #: parameter indices by bucket, in launch order
    bucket_cap_mb_list: tuple[float, ...] | None
    """caps in MiB with which torch's class, and ours, close exactly these buckets after the rebuild; None: none do"""
    iteration_ns: int  #: objective with these buckets, as `predict` gives it
    interval_ns: tuple[int, int]  #: interval that contains 90 % of the iterations
    lower_bound_ns: int  #: objective that no buckets can beat, in any order and of any sizes
    keep_default: bool
    """whether the gain over torch's default may be due to the errors of the costs, which both share
    (`Comparison.is_tie`), or is smaller than the error that no cost explains (`unexplained`)"""
    cap_rule: CapRule  #: when a bucket is closed in `best_cap_mb`
    best_cap_mb: float  #: best single cap for all buckets, MiB
    best_cap_ns: int  #: objective with this cap
    rule_caps_mb: tuple[float, ...] = ()  #: caps by the rule of docs/bucket_size.md, MiB
    rule_ties: bool = False
    """whether that rule's buckets are as fast as these within the errors of the costs, as for `keep_default`"""
    baselines: tuple[Baseline, ...]  #: known rules, the fastest first
    assumed: tuple[str, ...] = ()  #: as in a prediction, one sentence each

    @property
    def default_ns(self) -> int:
        """Objective with torch's default caps, or with the given buckets."""
        times = {one.name: one.iteration_ns for one in self.baselines}
        return times.get(GIVEN, times[DEFAULT])

    @property
    def gain(self) -> float:
        """Part of the default's time that this plan saves."""
        return 1 - self.iteration_ns / max(1, self.default_ns)

    @property
    def gap(self) -> float:
        """Part of this plan's time by which it lies above the bound; no buckets save more."""
        return 1 - self.lower_bound_ns / max(1, self.iteration_ns)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        write_atomically(path, (self.model_dump_json(indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan written by `save`.

        Raises:
            ValueError: The file is missing or no plan; the message names the file, the field and the reason.
        """
        return read_schema(cls, path, what="a plan of buckets", cure="expected a plan as `BucketPlan.save` writes it")
