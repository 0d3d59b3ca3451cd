"""Sweep: predictions of all combinations of traces, fabrics, world sizes and settings, as one table."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product, starmap
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from pydantic import InstanceOf

from ..reference.trace import Trace
from .argument_checks import Listed, Measured, Ranks, Stragglers, checked, one_or_several
from .fabric import Fabric
from .inputs_with_default_costs import Inputs, complete
from .predicted_iteration import FIGURES, TAIL, ties_of
from .prediction import System
from .schedule.policy import Policy, PolicySettings
from .workload.compute_times import check_stragglers
from .workload.variation import RECORDED, Variation

if TYPE_CHECKING:
    import pandas as pd

AXES = ("trace", "fabric", "world_size", "bucket_cap_mb", "order", "hook")
COLUMNS = (
    *(*AXES, "buckets", "iteration_ns", "low_ns", "high_ns", *FIGURES[1:]),
    *("efficiency", "efficiency_low", "efficiency_high", "is_tie"),
)
"""Columns of the table. `low_ns` and `high_ns` are the ends of the 90 % interval; `efficiency` and the ends of its
interval are those of `Prediction`; `is_tie`: whether it ties with the fastest of its trace, fabric and world size."""
FEW = 64
"""Configurations that take no longer than the start of further processes."""


@checked
def sweep(
    trace: Annotated[Trace | Mapping[str, Trace], one_or_several(Trace)],
    fabric: Annotated[Fabric | Mapping[str, Fabric], one_or_several(Fabric)],
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
    on_progress: Callable[[str, int, int], None] = lambda _label, _done, _total: None,
    **settings: Unpack[PolicySettings],
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
        n_jobs: Number of processes, among which traces, fabrics and world sizes are divided. None: one per core, or
            one for few configurations; -1: one per core.
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
    for name, values in zip(AXES, [list(traces), list(fabrics), world_sizes, *choices], strict=True):
        if not values:
            raise ValueError(f"{name}: expected at least one value to sweep over, got none")
        if len(values) > 1 and (fixed_by := policy.overruled.get(name)):
            raise ValueError(f"{name}: expected one value, which the policy's {fixed_by} fixes, got {len(values)}")
    policies = [Policy(**(dict(policy) | dict(zip(AXES[3:], choice, strict=True)))) for choice in product(*choices)]
    of_runs = policies[0] if len(policies) == 1 else policy
    how: dict[str, Any] = {"policy": of_runs, "variation": variation, "stragglers": stragglers, "assume": assume}
    if measured and (several := [name for name, axis in (("trace", traces), ("fabric", fabrics)) if len(axis) > 1]):
        expected = "expected one trace and one fabric, those of the measured runs"
        raise ValueError(f"measured: {expected}, got several {several[0]}s")
    cells = list(product(traces, fabrics, world_sizes))
    check_stragglers(min(world_sizes), stragglers)
    systems = {
        (one, other): System(complete(traces[one], fabrics[other], measured=measured, **how))
        for one, other in product(traces, fabrics)
    }
    tasks = [
        (systems[one, other], size, [systems[one, other].inputs._replace(policy=policy) for policy in policies])
        for one, other, size in cells
    ]
    rows: list[dict[str, Any]] = []
    for cell, some in zip(cells, _run(tasks, n_jobs), strict=True):
        rows += (dict(zip(AXES, cell, strict=False)) | row for row in some)
        on_progress("sweeping", len(rows), len(cells) * len(policies))

    import pandas as pd  # loading pandas takes longer than most sweeps

    return pd.DataFrame(rows, columns=COLUMNS).astype(dict.fromkeys(TAIL, "Int64"))


def rows_of(system: System, world_size: int, each: Sequence[Inputs]) -> list[dict[str, Any]]:
    """Predict an iteration from each of some inputs on one number of ranks; return rows of the table."""
    predictions = [system.at(world_size, one) for one in each]
    return [
        {
            "world_size": world_size,
            "bucket_cap_mb": given.policy.bucket_cap_mb,
            "order": given.policy.order,
            "hook": given.policy.hook.name,
            **{name: getattr(one, name) for name in (*FIGURES, "efficiency")},
            **dict(zip(("low_ns", "high_ns"), one.interval_ns, strict=True)),
            **dict(zip(("efficiency_low", "efficiency_high"), one.efficiency_interval, strict=True)),
            "buckets": len(one.buckets),
            "is_tie": is_tie,
        }
        for given, one, is_tie in zip(each, predictions, ties_of(predictions), strict=True)
    ]


def _run(tasks: Sequence[tuple[Any, ...]], n_jobs: int | None) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each task, which has the arguments of `rows_of`, in the order of the tasks."""
    if n_jobs is None and (len(tasks) == 1 or sum(len(each) for *_, each in tasks) <= FEW):
        n_jobs = 1
    if n_jobs == 1:
        yield from starmap(rows_of, tasks)
        return
    from concurrent.futures import ProcessPoolExecutor  # which takes a command a twentieth of a second to import
    from multiprocessing import get_context

    workers = n_jobs if n_jobs is not None and n_jobs > 0 else os.cpu_count()
    # Forked processes need neither an importable main program nor the modules of the caller loaded again.
    with ProcessPoolExecutor(workers, get_context("fork")) as pool:
        yield from pool.map(rows_of, *zip(*tasks, strict=True))
