"""Sweep: predictions of all combinations of traces, fabrics, world sizes and settings, as one table.

If speeds are constant, the closed form solves all fabrics and world sizes of a policy at once, as arrays. Other
configurations are predicted one by one, on all cores.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import InstanceOf, PlainValidator

from reference.files.reading import SHORT
from reference.files.value_ranges import as_int64
from reference.files.writing import write_atomically
from reference.trace import Trace

from .engines.closed_form import exposed_many
from .fabric import Fabric
from .interval import simulate_many
from .prediction import Listed, Prediction, Ranks, Stragglers, checked, predict
from .schedule.policy import Policy
from .schedule.schedule import build_schedule
from .step_costs import ScheduleCosts, charged_fabric, messages_of, price, price_schedule
from .workload.compute_times import (
    RECORDED,
    IterationSampler,
    Nanoseconds,
    RecordedModel,
    Straggler,
    Variation,
    recorded_model,
)

if TYPE_CHECKING:
    import pandas as pd

AXES = ("trace", "fabric", "world_size", "bucket_cap_mb", "order", "hook")
FIGURES = (
    *("iteration_ns", "low_ns", "high_ns", "mean_ns", "p95_ns", "p99_ns"),
    *("compute_ns", "no_overlap_ns", "exposed_comm_ns"),
)
"""Predicted times of a configuration; `low_ns` and `high_ns` are the ends of the 90 % interval."""
COLUMNS = (*AXES, "buckets", *FIGURES, "efficiency")
"""Columns of the table. `efficiency` is compute_ns / iteration_ns: 1 is perfect scaling."""

Progress = Callable[[str, int, int], None]
Cell = tuple[int, ...]
"""Position of a configuration in the results: its index along each of `AXES`."""

TASK_SIZE = 16
"""Predictions per joblib task."""


def _one_or_several(kind: type) -> PlainValidator:
    """Check an argument that is one instance, or several by name."""

    def check(given: object) -> object:
        for name, one in given.items() if isinstance(given, Mapping) else [("", given)]:
            if not isinstance(one, kind):
                seen = SHORT.repr(one) + (f" as {name!r}" if name else "")
                raise ValueError(f"expected a {kind.__name__}, or several by name, got {seen}")
        return given

    return PlainValidator(check)


@checked
def sweep(
    trace: Annotated[Trace | Mapping[str, Trace], _one_or_several(Trace)],
    fabric: Annotated[Fabric | Mapping[str, Fabric], _one_or_several(Fabric)],
    *,
    world_sizes: Annotated[Sequence[Ranks], Listed],
    bucket_caps_mb: Annotated[Sequence[Any], Listed] | None = None,
    orders: Annotated[Sequence[Any], Listed] | None = None,
    hooks: Annotated[Sequence[Any], Listed] | None = None,
    policy: InstanceOf[Policy] | None = None,
    variation: InstanceOf[Variation] = RECORDED,
    stragglers: Stragglers = (),
    n_jobs: int | None = None,
    on_progress: Progress = lambda _label, _done, _total: None,
    **settings: Any,
) -> "pd.DataFrame":
    """Predict the iteration time of every combination of traces, fabrics, world sizes and settings.

    Args:
        trace: One trace, or several by name.
        fabric: One fabric, or several by name.
        world_sizes: Numbers of ranks.
        bucket_caps_mb: Bucket caps in MiB. None: the policy's cap.
        orders: Bucket orders. None: the policy's order.
        hooks: Comm hooks, or their names as `named_hook` takes them. None: the policy's hook.
        policy: Settings of the reducer and how the training script uses it. None: given by `settings`.
        variation: How the simulated iterations are generated from the recorded ones.
        stragglers: Slow ranks.
        n_jobs: Number of parallel tasks. None: the number in `joblib.parallel_config` if that is more than one, else
            one per core.
        on_progress: Called with a label, the number of configurations done and the total number.
        settings: Fields of `Policy`, as an alternative to `policy`, as for `predict`.

    Returns:
        One row per configuration, with `COLUMNS`; times are in nanoseconds and equal those of `predict`.

    Raises:
        ValueError: As for `predict`; an axis has no values or is also given as a setting; or several caps or orders
            were given with a policy in which they have no effect, such as a policy with a plan.
        TypeError: A keyword argument is not a field of `Policy`.
    """
    axes = {"bucket_caps_mb": bucket_caps_mb, "orders": orders, "hooks": hooks}
    for (name, values), field in zip(axes.items(), AXES[3:], strict=True):
        if values is not None and field in settings:
            raise ValueError(f"{name}: expected either {name} or {field}, got both; give only {name}=[...]")
    policy = Policy.given(policy, settings)
    results = Results(
        traces={trace.workload.model: trace} if isinstance(trace, Trace) else dict(trace),
        fabrics={fabric.source: fabric} if isinstance(fabric, Fabric) else dict(fabric),
        world_sizes=world_sizes,
        choices=[
            [getattr(policy, field)] if values is None else values
            for field, values in zip(AXES[3:], axes.values(), strict=True)
        ],
        policy=policy,
        on_progress=on_progress,
    )
    tasks = results.solve_steady(variation, stragglers)
    for done in _run(tasks, n_jobs):
        results.put(done)
    return results.to_frame()


TABLE_WRITERS: dict[str, Callable[["pd.DataFrame", BytesIO], object]] = {
    ".csv": lambda table, data: table.to_csv(data, index=False),
    ".parquet": lambda table, data: table.to_parquet(data, index=False),
    ".json": lambda table, data: table.to_json(data, orient="records", indent=1),
}
"""Writer of a sweep's table by the ending of the file name."""


def save_table(table: "pd.DataFrame", path: str | os.PathLike[str]) -> None:
    """Write the table of a sweep as CSV, Parquet or JSON, by the ending of the file name.

    Raises:
        ValueError: Another ending.
        OSError: The file cannot be written.
    """
    ending = Path(path).suffix
    if ending not in TABLE_WRITERS:
        raise ValueError(f"{path}: expected a name that ends in {', '.join(TABLE_WRITERS)}")
    data = BytesIO()
    TABLE_WRITERS[ending](table, data)
    write_atomically(path, data.getvalue())


class Results:
    """Predicted times of all configurations, as arrays with one axis for each of `AXES`."""

    def __init__(
        self,
        *,
        traces: dict[str, Trace],
        fabrics: dict[str, Fabric],
        world_sizes: Sequence[int],
        choices: list[Sequence[Any]],
        policy: Policy,
        on_progress: Progress,
    ) -> None:
        self._traces, self._fabrics, self._world_sizes = traces, fabrics, world_sizes
        self._axes: list[Sequence[Any]] = [list(traces), list(fabrics), world_sizes, *choices]
        for name, values in zip(AXES, self._axes, strict=True):
            if not values:
                raise ValueError(f"{name}: expected at least one value to sweep over, got none")
            if len(values) > 1 and (field := policy.overruled.get(name)):
                raise ValueError(f"{name}: expected one value, which the policy's {field} fixes, got {len(values)}")
        shape = tuple(map(len, self._axes))
        self._policy = policy
        self._policies = {
            choice: Policy(**(dict(policy) | dict(zip(AXES[3:], values, strict=True))))
            for choice, values in zip(np.ndindex(shape[3:]), product(*choices), strict=True)
        }
        self._buckets = np.zeros(shape, np.int64)
        self._figures = np.zeros((*shape, len(FIGURES)), np.int64)
        self._done, self._on_progress = 0, on_progress

    def solve_steady(self, variation: Variation, stragglers: Sequence[Straggler]) -> "list[Task]":
        """Predict all configurations that `is_steady` with the closed form; return tasks for the others."""
        tasks: list[Task] = []
        for number, trace in enumerate(self._traces.values()):
            model = recorded_model(trace, unused_allowed=self._policy.unused_allowed)
            steady: dict[int, Fabric] = {}
            for place, fabric in enumerate(self._fabrics.values()):
                charged = charged_fabric(fabric, model)
                if is_steady(charged, self._policy):
                    steady[place] = charged
                    continue
                cells = [
                    ((number, place, along, *choice), size, policy)
                    for along, size in enumerate(self._world_sizes)
                    for choice, policy in self._policies.items()
                ]
                tasks += [
                    (trace, fabric, variation, stragglers, cells[first : first + TASK_SIZE])
                    for first in range(0, len(cells), TASK_SIZE)
                ]
            if steady:
                self._solve(number, model, steady, variation, stragglers)
        return tasks

    def _solve(
        self,
        number: int,
        model: RecordedModel,
        fabrics: dict[int, Fabric],
        variation: Variation,
        stragglers: Sequence[Straggler],
    ) -> None:
        """Store the results of one trace on these fabrics."""
        cycle = self._policy.sync_every
        samplers = {
            size: IterationSampler(model.compute_times, size, variation, stragglers, sync_every=cycle)
            for size in self._world_sizes
        }
        along = [list(samplers).index(size) for size in self._world_sizes]  # a world size may be listed twice
        batch = ClosedFormBatch(model, list(fabrics.values()), samplers, list(self._policies.values()))
        for choice, policy in self._policies.items():
            buckets, figures = batch.predict(policy)
            for row, place in enumerate(fabrics):
                self._buckets[number, place, :, *choice] = buckets
                self._figures[number, place, :, *choice] = figures[row][along]
            self._progress(len(fabrics) * len(self._world_sizes))

    def put(self, predicted: list[tuple[Cell, list[int]]]) -> None:
        """Store the results of a task."""
        for cell, (buckets, *figures) in predicted:
            self._buckets[cell], self._figures[cell] = buckets, figures
        self._progress(len(predicted))

    def to_frame(self) -> "pd.DataFrame":
        """Return the results as a table, one row per configuration, with `COLUMNS`."""
        import pandas as pd  # loading pandas takes longer than most sweeps

        hooks = [policy.hook.name for choice, policy in self._policies.items() if not any(choice[:-1])]
        frame = pd.MultiIndex.from_product([*self._axes[:-1], hooks], names=AXES).to_frame(index=False)
        frame["buckets"] = self._buckets.ravel()
        frame[list(FIGURES)] = self._figures.reshape(-1, len(FIGURES))
        frame["efficiency"] = frame["compute_ns"] / frame["iteration_ns"].clip(lower=1)
        return frame

    def _progress(self, more: int) -> None:
        self._done += more
        self._on_progress("sweeping", self._done, self._buckets.size)


Task = tuple[Trace, Fabric, Variation, Sequence[Straggler], Sequence[tuple[Cell, int, Policy]]]
"""Arguments of `_predict_cells`: configurations of one trace and one fabric for a joblib process."""


def _predict_cells(
    trace: Trace,
    fabric: Fabric,
    variation: Variation,
    stragglers: Sequence[Straggler],
    cells: Sequence[tuple[Cell, int, Policy]],
) -> list[tuple[Cell, list[int]]]:
    """Predict each cell of this world size and policy; return its number of buckets and `FIGURES`."""
    settings: dict[str, Any] = {"variation": variation, "stragglers": stragglers}
    predicted = []
    for cell, world_size, policy in cells:
        prediction = predict(trace, fabric, world_size=world_size, policy=policy, **settings)
        predicted.append((cell, [len(prediction.buckets), *figures_of(prediction)]))
    return predicted


def figures_of(prediction: Prediction) -> list[int]:
    """Return `FIGURES` of one prediction."""
    low, high = prediction.interval_ns
    interval = {"low_ns": low, "high_ns": high}
    return [interval[name] if name in interval else getattr(prediction, name) for name in FIGURES]


def _run(tasks: Sequence[Task], n_jobs: int | None) -> Iterator[list[tuple[Cell, list[int]]]]:
    """Yield the results of the tasks in the order in which the tasks finish."""
    if not tasks:
        return
    import joblib  # loading joblib takes longer than most predictions
    from joblib.parallel import get_active_backend

    if n_jobs is None:
        _backend, configured = get_active_backend()
        n_jobs = -1 if configured == 1 else configured
    parallel = joblib.Parallel(n_jobs=n_jobs, return_as="generator_unordered")
    yield from parallel(joblib.delayed(_predict_cells)(*task) for task in tasks)


def is_steady(fabric: Fabric, policy: Policy) -> bool:
    """Whether speeds are constant and collectives run one at a time, as `ClosedFormBatch` requires."""
    slows = any(max(row.compute, row.collective) > 1 for row in fabric.processor.slowed(1).contention)
    return not slows and fabric.concurrency * policy.process_groups == 1


class ClosedFormBatch:
    """Predicts one model on several fabrics and world sizes at once, with the closed form on arrays.

    Args:
        model: The recorded model.
        fabrics: Charged fabrics that are steady under every policy; see `charged_fabric` and `is_steady`.
        samplers: Sampler of the iterations at each world size.
        policies: All policies that will be predicted; needed here so that the cost of each message is computed once.
    """

    def __init__(
        self,
        model: RecordedModel,
        fabrics: Sequence[Fabric],
        samplers: Mapping[int, IterationSampler],
        policies: Sequence[Policy],
    ) -> None:
        self._model, self._fabrics = model, fabrics
        self._sizes, self._samplers = list(samplers), list(samplers.values())
        self._fabrics_alike = _alike([fabric.processor for fabric in fabrics])
        self._priced: dict[tuple[Policy, int, int], ScheduleCosts] = {}
        messages = {
            message for policy in policies for message in messages_of(self._costs(policy, 0, 0).untimed.schedule)
        }
        self._place = {message: place for place, message in enumerate(sorted(messages))}
        cost_ns = [[price(list(self._place), fabric, size) for size in self._sizes] for fabric in fabrics]
        self._cost_ns = np.array(cost_ns).reshape(len(fabrics), len(self._sizes), len(self._place))
        self._error = np.array([[fabric.relative_error(size) for size in self._sizes] for fabric in fabrics])
        self._spread = np.array([[fabric.iteration_spread(size) for size in self._sizes] for fabric in fabrics])

    def predict(self, policy: Policy) -> tuple[int, Nanoseconds]:
        """Return the number of buckets, and `FIGURES` of shape [fabrics, world sizes, figures]."""
        figures = np.empty((len(self._fabrics), len(self._sizes), len(FIGURES)), np.int64)
        sizes_alike = _alike(
            [
                (tuple(sampler.ranks.tolist()), policy.hook.growth(1, world_size))
                for world_size, sampler in zip(self._sizes, self._samplers, strict=True)
            ]
        )  # world sizes with equal keys have equal compute times and equal hook costs
        for fabrics, sizes in product(self._fabrics_alike, sizes_alike):
            costs = self._costs(policy, fabrics[0], sizes[0])
            places = [self._place[message] for message in messages_of(costs.untimed.schedule)]
            cells = np.ix_(fabrics, sizes)
            costs = replace(
                costs,
                untimed=replace(costs.untimed, cost_ns=self._cost_ns[*cells][..., places]),
                relative_error=self._error[cells],
                spread=self._spread[cells],
            )
            distribution = simulate_many(costs, self._samplers[sizes[0]], "closed_form")
            exposed_ns = as_int64(exposed_many(distribution.median) / policy.sync_every)
            others = [getattr(distribution, name) for name in FIGURES[:-1]]
            figures[cells] = np.stack([*others, exposed_ns], axis=-1)
        return len(costs.untimed.schedule.buckets), figures

    def _costs(self, policy: Policy, fabric: int, size: int) -> ScheduleCosts:
        """Return the costs of a policy on one fabric and world size, given by index; all have the same messages."""
        key = policy, fabric, size
        if key not in self._priced:
            schedule = build_schedule(policy, self._model)
            self._priced[key] = price_schedule(schedule, self._fabrics[fabric], policy, self._sizes[size])
        return self._priced[key]


def _alike(values: Sequence[object]) -> list[list[int]]:
    """Group the indices of equal values."""
    places: dict[object, list[int]] = {}
    for place, value in enumerate(values):
        places.setdefault(value, []).append(place)
    return list(places.values())
