"""Sweep: predictions of all combinations of traces, fabrics, world sizes and settings, as one table.

If speeds are constant, the closed form solves all fabrics and world sizes of a policy at once, as arrays. Other
configurations are predicted one by one, on all cores.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from pydantic import InstanceOf, PlainValidator

from reference.files.reading import SHORT
from reference.files.value_ranges import as_int64
from reference.trace import Trace

from .argument_checks import Listed, Measured, Ranks, Stragglers, checked
from .engines.closed_form import exposed_many
from .fabric import Fabric
from .interval import TAIL, UNKNOWN, simulate_many, ties
from .predicted_iteration import Prediction
from .prediction import predict
from .schedule.policy import Policy
from .schedule.schedule import build_schedule
from .step_costs import ScheduleCosts, charged_fabric, messages_of, price, price_schedule, relative_errors
from .workload.compute_times import Floats, IterationSampler, Nanoseconds, RecordedModel, recorded_model
from .workload.default_gpu_costs import assume_gpu, replayed
from .workload.variation import RECORDED, Variation

if TYPE_CHECKING:
    import pandas as pd

AXES = ("trace", "fabric", "world_size", "bucket_cap_mb", "order", "hook")
FIGURES = (
    *("iteration_ns", "low_ns", "high_ns", "mean_ns", "p95_ns", "p99_ns"),
    *("compute_ns", "no_overlap_ns", "exposed_comm_ns"),
)
"""Predicted times of a configuration; `low_ns` and `high_ns` are the ends of the 90 % interval."""
COLUMNS = (*AXES, "buckets", *FIGURES, "efficiency", "efficiency_low", "efficiency_high", "is_tie")
"""Columns of the table. `efficiency` and the ends of its interval are those of `Prediction`; `is_tie`: whether
it is, or ties with, the fastest configuration of the same trace, fabric and world size; see `interval.ties`."""

Progress = Callable[[str, int, int], None]
Cells = tuple[Any, ...]
"""Index of configurations in arrays of shape [traces, fabrics, world sizes, policies]."""
Causes = Mapping[str, Nanoseconds]
"""`Prediction.causes_ns` of several configurations, with both ends along the last axis."""
Predicted = tuple[Cells, int | Nanoseconds, Nanoseconds, Causes, Floats]
"""Configurations, their numbers of buckets, their `FIGURES` along the last axis, their causes, and the ends of the
intervals of their efficiencies along the last axis."""
Task = tuple[Cells, Trace, Fabric, Sequence[tuple[int, Policy]], dict[str, Any], "Measurement | None"]
"""Arguments of `_predict_cells`: configurations of one trace and one fabric for a joblib process."""

TASK_SIZE = 16
"""Predictions per joblib task."""


class Measurement(NamedTuple):
    """Measured median iteration times by number of ranks, and the settings of the measured runs."""

    iteration_ns: Mapping[int, int]
    policy: Policy


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
    measured: Measured | None = None,
    assume: bool = True,
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
        measured: As for `predict`, with the policy's settings, or those of the only configuration.
        assume: As for `predict`.
        n_jobs: Number of parallel tasks. None: the number in `joblib.parallel_config` if that is more than one, else
            one per core.
        on_progress: Called with a label, the number of configurations done and the total number.
        settings: Fields of `Policy`, as an alternative to `policy`, as for `predict`.

    Returns:
        One row per configuration, with `COLUMNS`; times are in nanoseconds and equal those of `predict`. Where
        `predict` returns None for p95_ns and p99_ns, they are missing.

    Raises:
        ValueError: As for `predict`; an axis has no values or is also given as a setting; several caps or orders were
            given with a policy in which they have no effect, such as a policy with a plan; or measured times with
            several traces or fabrics.
        TypeError: A keyword argument is not a field of `Policy`.
    """
    axes = {"bucket_caps_mb": bucket_caps_mb, "orders": orders, "hooks": hooks}
    for (name, values), field in zip(axes.items(), AXES[3:], strict=True):
        if values is not None and field in settings:
            raise ValueError(f"{name}: expected either {name} or {field}, got both; give only {name}=[...]")
    policy = Policy.given(policy, settings)
    traces = {trace.workload.model: trace} if isinstance(trace, Trace) else dict(trace)
    fabrics = {fabric.source: fabric} if isinstance(fabric, Fabric) else dict(fabric)
    choices = [
        [getattr(policy, field)] if values is None else values
        for field, values in zip(AXES[3:], axes.values(), strict=True)
    ]
    swept = [list(traces), list(fabrics), world_sizes, *choices]
    _check_axes(swept, policy)
    policies = [Policy(**(dict(policy) | dict(zip(AXES[3:], choice, strict=True)))) for choice in product(*choices)]
    shape = len(traces), len(fabrics), len(world_sizes), len(policies)
    buckets, figures = np.zeros(shape, np.int64), np.zeros((*shape, len(FIGURES)), np.int64)
    causes: dict[str, Nanoseconds] = {}
    efficiencies: Floats = np.zeros((*shape, 2))
    done = 0
    how: dict[str, Any] = {"variation": variation, "stragglers": stragglers, "assume": assume}
    if measured and (several := [name for name, axis in (("trace", traces), ("fabric", fabrics)) if len(axis) > 1]):
        raise ValueError(
            f"measured: expected one trace and one fabric, those of the measured runs, got several {several[0]}s"
        )
    run = Measurement(measured, policies[0] if len(policies) == 1 else policy) if measured else None
    for cells, some_buckets, some_figures, some_causes, some_efficiencies in _predicted(
        list(traces.values()), list(fabrics.values()), world_sizes, policies, how, run, n_jobs
    ):
        buckets[cells], figures[cells], efficiencies[cells] = some_buckets, some_figures, some_efficiencies
        for cause, ends in some_causes.items():
            causes.setdefault(cause, np.zeros((*shape, 2), np.int64))[cells] = ends
        done += buckets[cells].size
        on_progress("sweeping", done, buckets.size)

    import pandas as pd  # loading pandas takes longer than most sweeps

    hooks = [policy.hook.name for policy in policies[: len(choices[-1])]]
    frame = pd.MultiIndex.from_product([*swept[:-1], hooks], names=AXES).to_frame(index=False)
    frame["buckets"] = buckets.ravel()
    frame[list(FIGURES)] = figures.reshape(-1, len(FIGURES))
    for name in TAIL:
        frame[name] = frame[name].astype("Int64").mask(frame[name] == UNKNOWN)
    frame["efficiency"] = frame["compute_ns"] / frame["iteration_ns"].clip(lower=1)
    frame[["efficiency_low", "efficiency_high"]] = efficiencies.reshape(-1, 2)
    iteration_ns, *interval_ns = np.moveaxis(figures[..., :3], -1, 0)
    reach = {cause: (ends[..., 0], ends[..., 1]) for cause, ends in causes.items()}
    frame["is_tie"] = ties(iteration_ns, interval_ns, reach).ravel()
    return frame


def _check_axes(swept: Sequence[Sequence[Any]], policy: Policy) -> None:
    for name, values in zip(AXES, swept, strict=True):
        if not values:
            raise ValueError(f"{name}: expected at least one value to sweep over, got none")
        if len(values) > 1 and (field := policy.overruled.get(name)):
            raise ValueError(f"{name}: expected one value, which the policy's {field} fixes, got {len(values)}")


def _predicted(
    traces: Sequence[Trace],
    fabrics: Sequence[Fabric],
    world_sizes: Sequence[int],
    policies: Sequence[Policy],
    how: dict[str, Any],
    run: Measurement | None,
    n_jobs: int | None,
) -> Iterator[Predicted]:
    """Yield the predictions of the closed form for all configurations that are steady, then those of parallel tasks.

    The policies differ in bucket cap, order and hook; `how` has further arguments of `predict`.
    """
    pairs = list(np.ndindex(len(world_sizes), len(policies)))
    tasks: list[Task] = []
    for number, trace in enumerate(traces):
        model = recorded_model(trace, **policies[0].recorded_as(1))  # with `zero`, nothing is steady
        known, variation = list(fabrics), how["variation"]
        if how["assume"]:
            completed = [assume_gpu(trace, fabric, variation) for fabric in fabrics]
            known, variation = [one.fabric for one in completed], completed[0].variation
        if policies[0].cuda_graph:
            known, variation = [replayed(one, variation)[0] for one in known], replayed(known[0], variation)[1]
        if not model.layout:
            known = [charged_fabric(fabric, model) for fabric in known]
        steady = [place for place, fabric in enumerate(known) if not run and is_steady(fabric, policies[0])]
        for place in sorted(set(range(len(fabrics))) - set(steady)):
            for first in range(0, len(pairs), TASK_SIZE):
                some = pairs[first : first + TASK_SIZE]
                asked = [(world_sizes[along], policies[at]) for along, at in some]
                tasks.append(((number, place, *zip(*some, strict=True)), trace, fabrics[place], asked, how, run))
        if steady:
            samplers = {
                size: IterationSampler(
                    *(model.compute_times, size, variation, how["stragglers"]),
                    sync_every=policies[0].sync_every,
                    compute_bounds=model.compute_bounds,
                )
                for size in world_sizes
            }
            along = [list(samplers).index(size) for size in world_sizes]  # a world size may be listed twice
            solved = solve_steady(model, [known[place] for place in steady], samplers, policies)
            for at, (buckets, figures, causes, ends) in enumerate(solved):
                of_all = {cause: ns[:, along] for cause, ns in causes.items()}
                yield (number, steady, slice(None), at), buckets, figures[:, along], of_all, ends[:, along]
    if tasks:
        yield from _run(tasks, n_jobs)


def _predict_cells(
    cells: Cells,
    trace: Trace,
    fabric: Fabric,
    asked: Sequence[tuple[int, Policy]],
    how: dict[str, Any],
    run: Measurement | None,
) -> Predicted:
    """Predict each world size and policy of a task."""
    predictions = [predict(trace, fabric, world_size=size, policy=policy, **how) for size, policy in asked]
    if run:
        undisturbed = how | {"stragglers": ()}
        on_few = {
            ranks: predict(trace, fabric, world_size=ranks, policy=run.policy, **undisturbed)
            for ranks in {1, *run.iteration_ns}
        }
        predictions = [
            one.anchored(size, run.iteration_ns, on_few) for one, (size, _) in zip(predictions, asked, strict=True)
        ]
    causes = dict.fromkeys(cause for one in predictions for cause in one.causes_ns)
    return (
        cells,
        np.array([len(one.buckets) for one in predictions]),
        np.array([figures_of(one) for one in predictions], np.int64),
        {cause: np.array([one.causes_ns.get(cause, (0, 0)) for one in predictions]) for cause in causes},
        np.array([one.efficiency_interval for one in predictions]),
    )


def figures_of(prediction: Prediction) -> list[int]:
    """Return `FIGURES` of one prediction, with `UNKNOWN` for None."""
    low, high = prediction.interval_ns
    interval = {"low_ns": low, "high_ns": high}
    figures = [interval[name] if name in interval else getattr(prediction, name) for name in FIGURES]
    return [UNKNOWN if ns is None else ns for ns in figures]


def _run(tasks: Sequence[Task], n_jobs: int | None) -> Iterator[Predicted]:
    """Yield the results of the tasks in the order in which the tasks finish."""
    import joblib  # loading joblib takes longer than most predictions
    from joblib.parallel import get_active_backend

    if n_jobs is None:
        _backend, configured = get_active_backend()
        n_jobs = -1 if configured == 1 else configured
    parallel = joblib.Parallel(n_jobs=n_jobs, return_as="generator_unordered")
    yield from parallel(joblib.delayed(_predict_cells)(*task) for task in tasks)


def is_steady(fabric: Fabric, policy: Policy) -> bool:
    """Whether `solve_steady` applies: constant speeds, one collective at a time, one schedule for all world sizes."""
    return fabric.processor.slowed(1).slow_down == 1 and fabric.concurrency == 1 and policy.zero is None


def solve_steady(
    model: RecordedModel,
    fabrics: Sequence[Fabric],
    samplers: Mapping[int, IterationSampler],
    policies: Sequence[Policy],
) -> Iterator[tuple[int, Nanoseconds, Causes, Floats]]:
    """Predict several fabrics and world sizes at once, with the closed form on arrays.

    The cost of each message is computed once for all policies.

    Args:
        model: The recorded model.
        fabrics: Fabrics that are steady; see `is_steady`.
        samplers: Sampler of the iterations at each world size.
        policies: The policies to predict.

    Yields:
        For each policy its number of buckets, `FIGURES` of shape [fabrics, world sizes, figures], the causes, and the
        ends of the intervals of the efficiency.
    """
    sizes = list(samplers)

    @cache
    def costs_of(policy: Policy, fabric: int, size: int) -> ScheduleCosts:  # all have the same messages
        schedule = build_schedule(policy, model)
        charged = charged_fabric(fabrics[fabric], model, schedule.buckets)
        return price_schedule(schedule, charged, policy, sizes[size])

    sent = [messages_of(costs_of(policy, 0, 0).untimed.schedule) for policy in policies]
    place_of = {
        message: place for place, message in enumerate(sorted({message for some in sent for message in some}))
    }
    cost_ns = np.array([[price(list(place_of), fabric, size) for size in sizes] for fabric in fabrics])
    cost_ns = cost_ns.reshape(len(fabrics), len(sizes), len(place_of))
    errors = np.array([[relative_errors(list(place_of), fabric, size) for size in sizes] for fabric in fabrics])
    errors = errors.reshape(cost_ns.shape)
    spread = np.array([[fabric.iteration_spread(size) for size in sizes] for fabric in fabrics])
    fabrics_alike = _alike([fabric.processor for fabric in fabrics])
    for policy, own in zip(policies, sent, strict=True):
        places = [place_of[message] for message in own]
        figures = np.empty((len(fabrics), len(sizes), len(FIGURES)), np.int64)
        causes: dict[str, Nanoseconds] = {}
        efficiencies: Floats = np.empty((len(fabrics), len(sizes), 2))
        # World sizes with equal keys have equal compute times and equal hook costs.
        sizes_alike = _alike([(tuple(samplers[size].ranks.tolist()), policy.hook.gathered(size)) for size in sizes])
        if any(fabric.processor.stall_ns or fabric.processor.unexplained for fabric in fabrics):
            sizes_alike = [[place] for place in range(len(sizes))]
        for some_fabrics, some_sizes in product(fabrics_alike, sizes_alike):
            costs = costs_of(policy, some_fabrics[0], some_sizes[0])
            cells = np.ix_(some_fabrics, some_sizes)
            costs = replace(
                costs,
                untimed=replace(costs.untimed, cost_ns=cost_ns[*cells][..., places]),
                relative_errors=errors[*cells][..., places],
                spread=spread[cells],
            )
            sampler = samplers[sizes[some_sizes[0]]]
            distribution = simulate_many(costs, sampler, "closed_form")
            exposed_ns = as_int64(exposed_many(distribution.median) / policy.sync_every)
            others = [getattr(distribution, name) for name in FIGURES[:-1]]
            figures[cells] = np.stack([*others, exposed_ns], axis=-1)
            for cause, ends in distribution.causes_ns.items():
                of_all = causes.setdefault(cause, np.zeros((len(fabrics), len(sizes), 2), np.int64))
                of_all[cells] = np.stack(ends, axis=-1)
            efficiencies[cells] = np.stack(distribution.efficiency_interval(sampler.compute_errors), axis=-1)
        yield len(costs.untimed.schedule.buckets), figures, causes, efficiencies


def _alike(values: Sequence[object]) -> list[list[int]]:
    """Group the indices of equal values."""
    places: dict[object, list[int]] = {}
    for place, value in enumerate(values):
        places.setdefault(value, []).append(place)
    return list(places.values())
