"""ClosedFormBatch: one policy on many fabrics and world sizes at once, by the closed form, as arrays."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import joblib
import numpy as np
import pandas as pd
from joblib.parallel import get_active_backend

from reference.bucketing import Order
from reference.schema import validated
from reference.trace import Trace

from .argument_checks import check_sweep, check_world_size, checked_hook, overruled
from .distribution import Floats, error_factors, interval, simulate, summarize, whole
from .engines.closed_form import exposed_many, solve_many
from .fabric import Fabric
from .prediction import RECORDED, Prediction, as_charged, predict_policy
from .schedule.comm_hooks import CommHook
from .schedule.costs import Nanoseconds, ScheduleCosts, messages_of, price, price_schedule
from .schedule.policy import Policy, buckets_of
from .workload.compute_times import recorded_compute_times, stack
from .workload.variation import IterationSampler, Straggler, Variation

FIGURES = (
    *("iteration_ns", "low_ns", "high_ns", "mean_ns", "p95_ns", "p99_ns"),
    *("compute_ns", "no_overlap_ns", "exposed_comm_ns"),
)
"""What is told of a configuration; the last axis of all results."""


def is_steady(fabric: Fabric, policy: Policy) -> bool:
    """Whether speeds can't depend on what else runs: a batch takes only such fabrics."""
    slows = any(max(row.compute, row.collective) > 1 for row in fabric.processor.slowed(1).contention)
    return not slows and fabric.concurrency * policy.process_groups == 1


class ClosedFormBatch:
    """All fabrics and world sizes on which a trace is to be predicted.

    Args:
        trace: What is computed.
        fabrics: Steady ones.
        sampler: The iterations, by world size.
        policies: All that will be asked for, so that every message is priced once.
    """

    def __init__(
        self,
        trace: Trace,
        fabrics: Sequence[Fabric],
        sampler: Mapping[int, IterationSampler],
        policies: Sequence[Policy],
    ) -> None:
        self._trace, self._fabrics, self._samplers = trace, fabrics, list(sampler.values())
        self._sizes = sizes = list(sampler)
        self._fabrics_alike = _alike([fabric.processor for fabric in fabrics])
        self._drafts: dict[tuple[Policy, int, int], ScheduleCosts] = {}
        drafts = [self._drafted(policy, 0, 0) for policy in policies]
        messages = {message for costs in drafts for message in messages_of(costs.schedule)}
        self._place = {message: place for place, message in enumerate(sorted(messages))}
        priced = [[price(list(self._place), fabric, size) for size in sizes] for fabric in fabrics]
        self._cost_ns = np.array(priced).reshape(len(fabrics), len(sizes), len(self._place))
        self._error = np.array([[fabric.relative_error(size) for size in sizes] for fabric in fabrics])

    def predict(self, policy: Policy) -> tuple[int, Nanoseconds]:
        """The number of buckets, and `FIGURES` of every cell; shape [fabrics, world sizes, figures]."""
        figures = np.empty((len(self._fabrics), len(self._samplers), len(FIGURES)), np.int64)
        for fabrics in self._fabrics_alike:
            for sizes in self._sizes_alike(policy):
                costs = self._drafted(policy, fabrics[0], sizes[0])
                places = [self._place[message] for message in messages_of(costs.schedule)]
                cells = np.ix_(fabrics, sizes)
                here = replace(costs, cost_ns=self._cost_ns[*cells][..., places])
                figures[cells] = _cell_figures(here, self._samplers[sizes[0]], self._error[cells])
        return len(costs.buckets), figures

    def _sizes_alike(self, policy: Policy) -> list[list[int]]:
        """Places of world sizes whose ranks compute the same, hook included."""
        return _alike(
            [
                (sampler.identity, policy.hook.growth(1, world_size))
                for world_size, sampler in zip(self._sizes, self._samplers, strict=True)
            ]
        )

    def _drafted(self, policy: Policy, fabric: int, size: int) -> ScheduleCosts:
        """By places in the batch; messages are the same at every one."""
        asked = policy, fabric, size
        if asked not in self._drafts:
            buckets = buckets_of(policy, self._trace)
            self._drafts[asked] = price_schedule(
                self._trace, self._fabrics[fabric], policy, buckets, self._sizes[size], joins=False
            )
        return self._drafts[asked]


def _alike(values: Sequence[object]) -> list[list[int]]:
    """Places of equal values."""
    places: dict[object, list[int]] = {}
    for place, value in enumerate(values):
        places.setdefault(value, []).append(place)
    return list(places.values())


def _cell_figures(costs: ScheduleCosts, sampler: IterationSampler, relative_error: Floats) -> Nanoseconds:
    cycle = costs.policy.sync_every
    summary = summarize(simulate(costs, sampler, "closed_form"), cycle)
    numbers, which = np.unique(summary.place, return_inverse=True)
    medians = costs.engine_input(stack([sampler.work(int(number)) for number in numbers]), sampler.ranks.tolist())
    medians = replace(medians, duration_ns=medians.duration_ns[which.reshape(summary.place.shape)])
    cheaper, dearer = (
        solve_many(replace(medians, cost_ns=whole(costs.cost_ns * factor))) / cycle
        for factor in error_factors(relative_error)
    )
    exposed = whole(exposed_many(medians) / cycle)
    low, high = interval(summary, (cheaper, dearer))
    iteration, compute = whole(summary.median), whole(summary.compute)
    rest = map(whole, (summary.mean, summary.p95, summary.p99))
    return np.stack([iteration, low, high, *rest, compute, whole(summary.no_overlap), exposed], axis=-1)


Progress = Callable[[str, int, int], None]
Cell = tuple[int, ...]
"""Where a configuration is in the results: its number along each axis."""

POLICY = Policy()
AXES = ("trace", "fabric", "world_size", "bucket_cap_mb", "order", "hook")
COLUMNS = (*AXES, "buckets", *FIGURES, "efficiency")
"""Of the table. `efficiency` is compute_ns / iteration_ns: 1 is perfect scaling."""

TASK_SIZE = 16
"""Replays that one task for joblib holds."""


@dataclass(frozen=True, slots=True)
class Task:
    """Configurations of one trace and fabric that are replayed somewhere else."""

    trace: Trace
    fabric: Fabric
    variation: Variation
    stragglers: tuple[Straggler, ...]
    cells: tuple[tuple[Cell, int, Policy], ...]

    def run(self) -> list[tuple[Cell, list[int]]]:
        """The number of buckets and `FIGURES` of each."""
        return [
            (
                cell,
                _figures(
                    predict_policy(
                        self.trace,
                        self.fabric,
                        world_size,
                        policy,
                        variation=self.variation,
                        stragglers=self.stragglers,
                    )
                ),
            )
            for cell, world_size, policy in self.cells
        ]


def sweep(
    trace: Trace | Mapping[str, Trace],
    fabric: Fabric | Mapping[str, Fabric],
    *,
    world_sizes: Sequence[int],
    bucket_caps_mb: Sequence[float | None] = (25,),
    orders: Sequence[Order] = ("ready",),
    hooks: Sequence[CommHook | str] = ("none",),
    policy: Policy = POLICY,
    variation: Variation = RECORDED,
    stragglers: Sequence[Straggler] = (),
    n_jobs: int | None = None,
    on_progress: Progress = lambda _word, _done, _total: None,
) -> pd.DataFrame:
    """Predict every combination.

    Args:
        trace: One trace, or several by name.
        fabric: One fabric, or several by name.
        world_sizes: Numbers of ranks.
        bucket_caps_mb: Caps in MiB.
        orders: Bucket orders.
        hooks: Comm hooks, or their names as `named_hook` takes them.
        policy: Everything else that the reducer is told.
        variation: How iterations differ from each other.
        stragglers: Slow ranks.
        n_jobs: Tasks at a time. None: as many as there are cores, or what `joblib.parallel_config` says
            if that is more than one.
        on_progress: TargetRun a word, how many configurations are done, of how many.

    Returns:
        One row a configuration, with `COLUMNS`: times in nanoseconds, the same as `predict` gives.

    Raises:
        ValueError: As for `predict`; or nothing to sweep over; or several caps or orders beside a policy that leaves
            no choice of them, as one with a plan.
    """
    check_sweep(
        *(trace, fabric, policy, variation, stragglers),
        world_sizes=world_sizes, bucket_caps_mb=bucket_caps_mb, orders=orders, hooks=hooks,
    )  # fmt: skip
    results = Results(
        traces={trace.workload.model: trace} if isinstance(trace, Trace) else dict(trace),
        fabrics={fabric.source: fabric} if isinstance(fabric, Fabric) else dict(fabric),
        world_sizes=list(world_sizes),
        choices=(list(bucket_caps_mb), list(orders), [checked_hook(hook) for hook in hooks]),
        policy=policy,
        on_progress=on_progress,
    )
    tasks = []
    for number, one in enumerate(results.traces.values()):
        results.solve(number, variation, stragglers)
        for place, each in enumerate(results.fabrics.values()):
            if not is_steady(as_charged(each, one), policy):
                cells = results.cells(number, place)
                tasks += [
                    Task(one, each, variation, tuple(stragglers), tuple(cells[first : first + TASK_SIZE]))
                    for first in range(0, len(cells), TASK_SIZE)
                ]
    for done in _run(tasks, n_jobs):
        results.put(done)
    return results.to_frame()


class Results:
    """Figures of all configurations, as arrays with an axis for each of `AXES`."""

    def __init__(
        self,
        *,
        traces: dict[str, Trace],
        fabrics: dict[str, Fabric],
        world_sizes: list[int],
        choices: tuple[list[float | None], list[Order], list[CommHook]],
        policy: Policy,
        on_progress: Progress,
    ) -> None:
        self.traces, self.fabrics, self._world_sizes = traces, fabrics, world_sizes
        self._axes: list[list[Any]] = [list(traces), list(fabrics), world_sizes, *choices]
        for name, values in zip(AXES, self._axes, strict=True):
            if not values:
                raise ValueError(f"{name}: expected at least one to sweep over, got none")
            if len(values) > 1 and (field := overruled(policy).get(name)):
                raise ValueError(f"{name}: expected one, as the policy's {field} leaves no choice, got {len(values)}")
        for size in world_sizes:
            check_world_size(size)
        shape = tuple(map(len, self._axes))
        self._buckets = np.zeros(shape, np.int64)
        self._figures = np.zeros((*shape, len(FIGURES)), np.int64)
        self._policies = {
            choice: validated(Policy, **(dict(policy) | {"bucket_cap_mb": cap, "order": order, "hook": hook}))
            for choice, (cap, order, hook) in zip(np.ndindex(shape[3:]), product(*choices), strict=True)
        }
        self._policy, self._on_progress, self._done = policy, on_progress, 0

    def solve(self, number: int, variation: Variation, stragglers: Sequence[Straggler]) -> None:
        """Predict one trace on all fabrics whose speeds are constant."""
        trace = list(self.traces.values())[number]
        charged = {place: as_charged(fabric, trace) for place, fabric in enumerate(self.fabrics.values())}
        steady = {place: fabric for place, fabric in charged.items() if is_steady(fabric, self._policy)}
        if not steady:
            return
        works = recorded_compute_times(trace, unused_allowed=self._policy.unused_allowed)
        cycle = self._policy.sync_every
        sampler = {
            size: IterationSampler(works, size, variation, stragglers, sync_every=cycle) for size in self._world_sizes
        }
        again = [list(sampler).index(size) for size in self._world_sizes]  # a size may be asked for twice
        batch = ClosedFormBatch(trace, list(steady.values()), sampler, list(self._policies.values()))
        for choice, policy in self._policies.items():
            buckets, figures = batch.predict(policy)
            for row, place in enumerate(steady):
                self._buckets[number, place, :, *choice] = buckets
                self._figures[number, place, :, *choice] = figures[row][again]
            self._progress(len(steady) * len(self._world_sizes))

    def cells(self, trace: int, fabric: int) -> list[tuple[Cell, int, Policy]]:
        """All configurations of a trace and a fabric."""
        return [
            ((trace, fabric, place, *choice), size, policy)
            for place, size in enumerate(self._world_sizes)
            for choice, policy in self._policies.items()
        ]

    def put(self, replayed: list[tuple[Cell, list[int]]]) -> None:
        """Take in what a task returned."""
        for cell, (buckets, *figures) in replayed:
            self._buckets[cell], self._figures[cell] = buckets, figures
        self._progress(len(replayed))

    def to_frame(self) -> pd.DataFrame:
        """One row a configuration."""
        named = [*self._axes[:5], [hook.name for hook in self._axes[5]]]
        frame = pd.MultiIndex.from_product(named, names=AXES).to_frame(index=False)
        frame["buckets"] = self._buckets.ravel()
        frame[list(FIGURES)] = self._figures.reshape(-1, len(FIGURES))
        frame["efficiency"] = frame["compute_ns"] / frame["iteration_ns"].clip(lower=1)
        return frame

    def _progress(self, more: int) -> None:
        self._done += more
        self._on_progress("sweeping", self._done, self._buckets.size)


def _run(tasks: Sequence[Task], n_jobs: int | None) -> Iterator[list[tuple[Cell, list[int]]]]:
    """What tasks return, as they end."""
    if not tasks:
        return
    if n_jobs is None:
        _backend, configured = get_active_backend()
        n_jobs = -1 if configured == 1 else configured
    parallel = joblib.Parallel(n_jobs=n_jobs, return_as="generator_unordered")
    yield from parallel(joblib.delayed(Task.run)(task) for task in tasks)


def _figures(prediction: Prediction) -> list[int]:
    """As the batch gives them, after the number of buckets."""
    low, high = prediction.interval_ns
    known = vars(prediction) | {"low_ns": low, "high_ns": high}
    return [len(prediction.buckets), *(known[name] for name in FIGURES)]
