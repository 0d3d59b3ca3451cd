"""Validate: predict real training runs, then make them, and compare.

The order is the point: one trace without communication is recorded, the machine is calibrated, all
predictions are written to disk, and only then does the first target run begin. `predict` gets a trace and a
fabric and nothing else, so no prediction can have seen a measurement.

Between target runs computation alone is timed. Where it shows that the machine was noisy, the run next to it is
made again (see `quiet`).
"""

import gc
import hashlib
import json
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import nn

from reference import models
from reference.bucketing import Order, bucket_caps
from reference.data_parallel import DistributedDataParallel
from reference.launch import Progress, RankPool, no_progress, report_progress
from reference.recorder import record
from reference.trace import Trace, join

from .calibrate import REPEATS, SIZES_BYTES, measure_collectives, with_slowdowns
from .fabric import Fabric
from .prediction import Prediction, predict, trace_buckets
from .quiet import iteration_times_ns, quiet_limit_ns, quiet_part

WARM_UP = 2
RECORDED_ITERATIONS = 8
ITERATIONS_PER_VISIT = 2
"""Measured iterations each time a configuration has its turn, after one that is not counted."""

Visit = tuple[bool, list[int]]
"""Whether the machine was quiet around a turn, and the nanoseconds of its iterations."""


@dataclass(frozen=True)
class Configuration:
    """One target run: a bucket cap in MiB (infinity: one single bucket) and an order."""

    cap_mb: float
    order: Order


Target = tuple[str, Configuration]
"""A model under a configuration: one target run."""


@dataclass(frozen=True)
class Row:
    """A configuration's prediction beside its measurement; times in nanoseconds, errors as fractions.

    `quartiles_ns` is the measurement's spread; `quiet` tells whether the machine was quiet at least once, and only
    such turns count where there are any. `error` is predicted / measured - 1, and so are those of the
    two yardsticks: perfect scaling (computation alone) and no overlap (all-reduces after the backward pass).
    """

    model: str
    cap_mb: float
    order: str
    buckets: int
    measured_ns: int
    quartiles_ns: tuple[int, int]
    quiet: bool
    predicted_ns: int
    interval_ns: tuple[int, int]
    error: float
    perfect_scaling_error: float
    no_overlap_error: float


@dataclass(frozen=True)
class Report:
    """All rows, and what they amount to.

    Attributes:
        predictions_sha256: Of the file of predictions, as it was before the first target run.
        mape: Mean absolute error.
        worst_error: The error that is farthest from zero.
        sign_errors: Pairs of configurations that the prediction ranks the wrong way round, of those pairs
            whose measured quartiles do not overlap.
        coverage: Fraction of measurements inside the predicted interval.
        rows: One a configuration.
    """

    predictions_sha256: str
    mape: float
    worst_error: float
    sign_errors: int
    coverage: float
    rows: tuple[Row, ...]

    def to_frame(self) -> pd.DataFrame:
        """The rows as a table."""
        return pd.DataFrame([asdict(row) for row in self.rows])

    def to_json(self) -> dict[str, Any]:
        """All of it; an infinite cap is written as null."""
        fields = asdict(self)
        for row in fields["rows"]:
            row["cap_mb"] = row["cap_mb"] if row["cap_mb"] != float("inf") else None
        return fields


def validate(
    pool: RankPool,
    model_names: Sequence[str],
    configurations: Sequence[Configuration],
    *,
    out: Path,
    repeat: int = 3,
    on_progress: Progress = no_progress,
) -> Report:
    """Record, calibrate, predict, write, and only then measure.

    Args:
        pool: The ranks to train on.
        model_names: Models to train, as for `--model`.
        configurations: What to predict and measure for each model.
        out: Folder for `predictions.json`, `report.json` and `report.csv`, and for each model a folder with
            its `trace.json.gz` and `fabric.json`.
        repeat: How often each configuration has its turn.
        on_progress: Told of every step.

    Raises:
        RankError: A rank failed.
    """
    traces, fabrics = _calibrate(pool, model_names, on_progress)
    for model in model_names:
        traces[model].save(out / model / "trace.json.gz")
        fabrics[model].save(out / model / "fabric.json")
    predictions = {
        (model, configuration): predict_one(traces[model], fabrics[model], configuration, pool.world_size)
        for model in model_names
        for configuration in configurations
    }
    digest = _write_predictions(out / "predictions.json", predictions)
    measured = _measure(pool, traces, configurations, repeat, on_progress)
    rows = [_row(*target, prediction, measured[target]) for target, prediction in predictions.items()]
    report = summarize(rows, digest)
    (out / "report.json").write_text(json.dumps(report.to_json(), indent=1))
    report.to_frame().to_csv(out / "report.csv", index=False)
    return report


def predict_one(trace: Trace, fabric: Fabric, configuration: Configuration, world_size: int) -> Prediction:
    """The prediction for one configuration."""
    return predict(
        trace, fabric, world_size=world_size, bucket_cap_mb=configuration.cap_mb, order=configuration.order
    )


def summarize(rows: Sequence[Row], digest: str) -> Report:
    """The figures of a set of rows."""
    errors = [row.error for row in rows]
    return Report(
        predictions_sha256=digest,
        mape=statistics.fmean(map(abs, errors)),
        worst_error=max(errors, key=abs),
        sign_errors=sum(_ranked_wrongly(a, b) for a, b in combinations(rows, 2) if a.model == b.model),
        coverage=statistics.fmean(row.interval_ns[0] <= row.measured_ns <= row.interval_ns[1] for row in rows),
        rows=tuple(rows),
    )


def _ranked_wrongly(a: Row, b: Row) -> bool:
    if a.measured_ns > b.measured_ns:
        a, b = b, a
    really_faster = a.quartiles_ns[1] < b.quartiles_ns[0]
    return really_faster and a.predicted_ns > b.predicted_ns


def _plan(trace: Trace, configuration: Configuration) -> list[list[int]] | float:
    """How the real reducer is told: by its cap where it finds the order itself, by an explicit plan elsewhere."""
    if configuration.order == "ready":
        return configuration.cap_mb
    return trace_buckets(trace, bucket_caps(configuration.cap_mb), configuration.order)


def _calibrate(
    pool: RankPool, model_names: Sequence[str], on_progress: Progress
) -> tuple[dict[str, Trace], dict[str, Fabric]]:
    """Traces and fabrics by model. Recording is spread over the whole time, as a machine's speed drifts."""
    recordings: dict[str, list[Trace]] = {model: [] for model in model_names}

    def record_all() -> None:
        for model in model_names:
            on_progress(f"{model}: recording computation", 0, 1)
            recordings[model].append(pool.run(record_computation, model)[0])

    record_all()
    collectives = measure_collectives(pool, SIZES_BYTES, REPEATS, on_progress)
    record_all()
    fabrics = {}
    for model in model_names:
        on_progress(f"{model}: calibrating slow-downs", 0, 1)
        fabrics[model] = with_slowdowns(pool, model, collectives)
    record_all()
    return {model: quiet_part(join(traces)) for model, traces in recordings.items()}, fabrics


def _write_predictions(path: Path, predictions: dict[Target, Prediction]) -> str:
    rows = [{"model": model, **asdict(c), **p.to_json()} for (model, c), p in predictions.items()]
    text = json.dumps(rows, indent=1)
    path.write_text(text)
    return hashlib.sha256(text.encode()).hexdigest()


def _measure(
    pool: RankPool,
    traces: dict[str, Trace],
    configurations: Sequence[Configuration],
    repeat: int,
    on_progress: Progress,
) -> dict[Target, Visit]:
    """All turns of each target, as one; of each iteration the slowest rank's time. Models take turns."""
    visits: dict[Target, list[Visit]] = {(model, c): [] for model in traces for c in configurations}
    for turn in range(repeat):
        for model, trace in traces.items():
            plans = [_plan(trace, configuration) for configuration in configurations]
            word = f"{model}: training, turn {turn + 1} of {repeat}"
            limit = quiet_limit_ns(iteration_times_ns(trace))
            by_rank = pool.run(train_configurations, model, plans, limit, word, on_progress=on_progress)
            for configuration, *of_ranks in zip(configurations, *by_rank, strict=True):
                slowest = [max(times) for times in zip(*(times for _, times in of_ranks), strict=True)]
                visits[model, configuration].append((of_ranks[0][0], slowest))
    return {target: _count_quiet(of_target) for target, of_target in visits.items()}


def _count_quiet(visits: list[Visit]) -> Visit:
    """The turns in which the machine was quiet; all of them if it never was."""
    quiet = [times for was_quiet, times in visits if was_quiet]
    return bool(quiet), [ns for times in quiet or [times for _, times in visits] for ns in times]


def _row(model: str, configuration: Configuration, prediction: Prediction, visit: Visit) -> Row:
    quiet, times = visit
    low, middle, high = (round(q) for q in statistics.quantiles(times, n=4, method="inclusive"))
    return Row(
        model=model,
        cap_mb=configuration.cap_mb,
        order=configuration.order,
        buckets=len(prediction.buckets),
        measured_ns=middle,
        quartiles_ns=(low, high),
        quiet=quiet,
        predicted_ns=prediction.iteration_ns,
        interval_ns=prediction.interval_ns,
        error=prediction.iteration_ns / middle - 1,
        perfect_scaling_error=prediction.compute_ns / middle - 1,
        no_overlap_error=prediction.no_overlap_ns / middle - 1,
    )


# Bodies of ranks


def record_computation(_rank: int, _world_size: int, model: str, iterations: int = RECORDED_ITERATIONS) -> Trace:
    """All ranks compute at the same time, as they will in training, but do not communicate."""
    module, loss_fn, optimizer = _build(model)
    for _ in range(WARM_UP):
        _step(module, loss_fn, optimizer)
    dist.barrier()
    with record(module, model=model, process_group=dist.group.WORLD) as recording:
        for _ in range(iterations):
            _step(module, loss_fn, optimizer)
    return recording.trace


def train_configurations(
    rank: int,
    _world_size: int,
    model: str,
    plans: Sequence[list[list[int]] | float],
    limit_ns: int,
    word: str,
) -> list[Visit]:
    """Train under each configuration in turn; what each turn took, by configuration.

    A turn next to which computation alone took longer than `limit_ns` is put off to the end, once.
    """
    module, loss_fn, optimizer = _build(model)
    visits: dict[int, Visit] = {}
    waiting = deque(range(len(plans)))
    quiet_before = _is_quiet(module, loss_fn, optimizer, limit_ns)
    while waiting:
        number = waiting.popleft()
        if rank == 0:
            report_progress(word, len(plans) - len(waiting) - 1, len(plans))
        times = list(_visit(module, loss_fn, optimizer, plans[number]))
        quiet_after = _is_quiet(module, loss_fn, optimizer, limit_ns)
        if number not in visits and not (quiet_before and quiet_after):
            waiting.append(number)
        visits[number] = (quiet_before and quiet_after, times)
        quiet_before = quiet_after
    return [visits[number] for number in range(len(plans))]


def _is_quiet(module: nn.Module, loss_fn: models.Loss, optimizer: torch.optim.Optimizer, limit_ns: int) -> bool:
    """Whether computation alone takes no longer than `limit_ns` on any rank, right now."""
    dist.barrier()
    start = time.perf_counter_ns()
    _step(module, loss_fn, optimizer)
    slowest = torch.tensor(time.perf_counter_ns() - start)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return int(slowest) <= limit_ns


def _visit(
    module: nn.Module, loss_fn: models.Loss, optimizer: torch.optim.Optimizer, plan: list[list[int]] | float
) -> Iterator[int]:
    if isinstance(plan, float):
        ddp = DistributedDataParallel(module, bucket_cap_mb=plan)
    else:
        ddp = DistributedDataParallel(module, plan=plan)
    warm_up = 2 if isinstance(plan, float) else 1  # the rebuild comes with the second iteration
    for _ in range(warm_up):
        _step(ddp, loss_fn, optimizer)
    dist.barrier()
    start = time.perf_counter_ns()
    for _ in range(ITERATIONS_PER_VISIT):
        _step(ddp, loss_fn, optimizer)
        end = time.perf_counter_ns()
        yield end - start
        start = end
    ddp.reducer.detach()
    del ddp
    gc.collect()


def _build(model: str) -> tuple[nn.Module, models.Loss, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module, loss_fn = models.build(model)
    return module, loss_fn, torch.optim.SGD(module.parameters(), lr=1e-3)


def _step(module: nn.Module, loss_fn: models.Loss, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss_fn(module).backward()
    optimizer.step()
