"""Grid: one policy on many fabrics and world sizes at once, by the closed form, as arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from reference.trace import Trace

from .engines.closed_form import solve_many
from .fabric import Fabric
from .iteration.blueprint import Blueprint, draft, messages_of, price
from .iteration.job import Nanoseconds
from .iteration.policy import Policy, buckets_of
from .sampling import Floats, error_factors, interval, simulate, summarize, whole
from .workload.draws import Draws
from .workload.work import stack

FIGURES = (
    *("iteration_ns", "low_ns", "high_ns", "mean_ns", "p95_ns", "p99_ns"),
    *("compute_ns", "no_overlap_ns", "exposed_comm_ns"),
)
"""What is told of a configuration; the last axis of all results."""


def is_steady(fabric: Fabric, policy: Policy) -> bool:
    """Whether speeds can't depend on what else runs: a grid takes only such fabrics."""
    slows = any(max(row.compute, row.collective) > 1 for row in fabric.processor.slowed(1).contention)
    return not slows and fabric.concurrency * policy.process_groups == 1


class Grid:
    """All fabrics and world sizes on which a trace is to be predicted.

    Args:
        trace: What is computed.
        fabrics: Steady ones.
        draws: The iterations, by world size.
        policies: All that will be asked for, so that every message is priced once.
    """

    def __init__(
        self, trace: Trace, fabrics: Sequence[Fabric], draws: Mapping[int, Draws], policies: Sequence[Policy]
    ) -> None:
        self._trace, self._fabrics, self._draws = trace, fabrics, list(draws.values())
        self._sizes = sizes = list(draws)
        self._fabrics_alike = _alike([fabric.processor for fabric in fabrics])
        self._drafts: dict[tuple[Policy, int, int], Blueprint] = {}
        drafts = [self._drafted(policy, 0, 0) for policy in policies]
        messages = {message for blueprint in drafts for message in messages_of(blueprint.script)}
        self._place = {message: place for place, message in enumerate(sorted(messages))}
        priced = [[price(list(self._place), fabric, size) for size in sizes] for fabric in fabrics]
        self._cost_ns = np.array(priced).reshape(len(fabrics), len(sizes), len(self._place))
        self._error = np.array([[fabric.relative_error(size) for size in sizes] for fabric in fabrics])

    def predict(self, policy: Policy) -> tuple[int, Nanoseconds]:
        """The number of buckets, and `FIGURES` of every cell; shape [fabrics, world sizes, figures]."""
        figures = np.empty((len(self._fabrics), len(self._draws), len(FIGURES)), np.int64)
        for fabrics in self._fabrics_alike:
            for sizes in self._sizes_alike(policy):
                blueprint = self._drafted(policy, fabrics[0], sizes[0])
                places = [self._place[message] for message in messages_of(blueprint.script)]
                cells = np.ix_(fabrics, sizes)
                here = replace(blueprint, cost_ns=self._cost_ns[*cells][..., places])
                figures[cells] = _figures(here, self._draws[sizes[0]], self._error[cells])
        return len(blueprint.buckets), figures

    def _sizes_alike(self, policy: Policy) -> list[list[int]]:
        """Places of world sizes whose ranks compute the same, hook included."""
        return _alike(
            [
                (draws.identity, policy.hook.growth(1, world_size))
                for world_size, draws in zip(self._sizes, self._draws, strict=True)
            ]
        )

    def _drafted(self, policy: Policy, fabric: int, size: int) -> Blueprint:
        """By places in the grid; messages are the same at every one."""
        asked = policy, fabric, size
        if asked not in self._drafts:
            buckets = buckets_of(policy, self._trace)
            self._drafts[asked] = draft(
                self._trace, self._fabrics[fabric], policy, buckets, self._sizes[size], joins=False
            )
        return self._drafts[asked]


def _alike(values: Sequence[object]) -> list[list[int]]:
    """Places of equal values."""
    places: dict[object, list[int]] = {}
    for place, value in enumerate(values):
        places.setdefault(value, []).append(place)
    return list(places.values())


def _figures(blueprint: Blueprint, draws: Draws, relative_error: Floats) -> Nanoseconds:
    cycle = blueprint.policy.sync_every
    summary = summarize(simulate(blueprint, draws, "closed_form"), cycle)
    numbers, which = np.unique(summary.place, return_inverse=True)
    medians = blueprint.job(stack([draws.work(int(number)) for number in numbers]), draws.ranks.tolist())
    work_ns = medians.work_ns[which.reshape(summary.place.shape)]
    cheaper, dearer = (
        solve_many(replace(medians, work_ns=work_ns, cost_ns=whole(blueprint.cost_ns * factor))) / cycle
        for factor in error_factors(relative_error)
    )
    low, high = interval(summary, (cheaper, dearer))
    iteration, compute = whole(summary.median), whole(summary.compute)
    rest = map(whole, (summary.mean, summary.p95, summary.p99))
    return np.stack([iteration, low, high, *rest, compute, whole(summary.no_overlap), iteration - compute], axis=-1)
