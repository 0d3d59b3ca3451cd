"""Validate on emulated devices: predict, then train on real ranks whose computation sleeps for recorded times.

The reducer, the collectives and the links are real. Only the computation is emulated. It hardly needs the processor,
always has the same speed, and overlaps with communication as on a GPU. The times of the trace therefore hold during
training, and only the collectives are calibrated. Whether the machine is fast enough for the emulated devices is
measured too (`Conditions`); if it is not, nothing is reported.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch.distributed as dist

from reference.data_parallel import DistributedDataParallel
from reference.launch import Progress, RankPool, let_network_threads_yield, no_progress, report_progress
from reference.models import EMULATED
from reference.trace import Trace

from ..fabric import Fabric, Timing
from ..schedule.schedule import buckets_of, build_schedule
from ..workload.compute_times import recorded_model
from ..workload.scale_model import ScaleModel
from .calibrate import REPEATS, measure_collectives, measure_hooks
from .collectives import AllReduceQueue, MessageBuffer, MessageSizes
from .conditions import Conditions
from .reducer_costs import BUCKET_BYTES, time_launch_after_pause
from .report import (
    Configuration,
    Measurement,
    Report,
    Row,
    make_row,
    policy_of,
    predict_one,
    predict_targets,
    summarize,
)
from .timing import ContentionTimes, median_ns, meet, of_slowest_rank, slowdown_factor, time_ns
from .training_runs import MEASURED_ITERATIONS, TargetRun, Trainer, time_iterations, warmed_up
from .validate import target_run, write_predictions

SLOW_DOWN_ROUNDS = 3
LAUNCHES = 40
"""Repetitions of the measurement of a launch."""
SIZE_RATIO = 1.5
"""Least ratio of two message sizes that are calibrated; between them, costs are interpolated."""


class SlowDownTimes(NamedTuple):
    """Times of one rank, alone and while device and network work at the same time.

    Attributes:
        passes: Times of iterations of the device.
        collectives: Times of all-reduces, of which several are in flight.
    """

    passes: ContentionTimes
    collectives: ContentionTimes


class EmulatedTurn(NamedTuple):
    """One turn of a target run on one rank.

    Attributes:
        times_ns: Nanoseconds of each measured iteration, from one slowest rank's end to the next.
        idle: Fraction of the machine's processor time in which it was idle.
        overslept_ns: How late each sleep of this rank's device ended.
    """

    times_ns: tuple[int, ...]
    idle: float
    overslept_ns: list[int]


def validate_emulated(
    pool: RankPool,
    trace: Trace,
    configurations: Sequence[Configuration],
    *,
    scale: ScaleModel,
    out: Path,
    repeat: int = 3,
    on_progress: Progress = no_progress,
) -> Report:
    """Calibrate the collectives, write the predictions, and only then train emulated devices and measure.

    Args:
        pool: The ranks to train on; the rate of their links is that of the scale model.
        trace: The computation to emulate. Rank r emulates its rank r, or starts again at rank 0 if there are more.
        configurations: Configurations of the original.
        scale: How the scale model that runs differs from the original.
        out: Folder for `trace.json.gz` and `fabric.json` of the scale model, `predictions.json` with its times, and
            `report.json` and `report.csv` with times of the original.
        repeat: Number of turns of each configuration; each trains the recorded iterations that follow on those of the
            turn before.
        on_progress: Called with each step's name, the parts done and all parts.

    Raises:
        ConditionsError: The machine is too slow, so there is no report; predictions were written.
        RankError: A rank failed.
        ValueError: There is no such hook, or some parameter got no gradient.
    """
    model_trace = scale.trace(trace, repeat * MEASURED_ITERATIONS)
    model_trace.save(out / "trace.json.gz")
    model, name = f"{EMULATED}{out / 'trace.json.gz'}", trace.workload.model
    in_model = [replace(one, cap_mb=scale.cap_mb(one.cap_mb)) for one in configurations]
    sizes = message_sizes(model_trace, in_model)
    pool.run(prepare_network)
    bucket_bytes = min(BUCKET_BYTES, sum(model_trace.sizes_bytes))
    fabric = measure_collectives(pool, sizes, REPEATS, on_progress, bucket_bytes=bucket_bytes)
    launch_ns = pool.run(time_launch_after_pause, LAUNCHES)[0]
    fabric = fabric.model_copy(update={"processor": fabric.processor.model_copy(update={"launch_ns": launch_ns})})
    fabric = measure_hooks(pool, fabric, [one.hook for one in configurations], model, on_progress=on_progress)
    fabric.save(out / "fabric.json")
    host_ns = _host_ns(pool, model, model_trace, fabric, on_progress)
    predicted_trace = with_longer_steps(model_trace, host_ns)
    predicted = dict(
        zip(configurations, predict_targets(predicted_trace, fabric, in_model, pool.world_size), strict=True)
    )
    digest = write_predictions(
        out / "predictions.json", {(name, configuration): one for configuration, one in predicted.items()}
    )
    slow_downs = _slow_downs(pool, model, sizes, on_progress)
    target_runs = [target_run(model_trace, configuration) for configuration in in_model]
    turns: list[list[list[EmulatedTurn]]] = []
    for turn in range(repeat):
        word = f"{name}: training emulated devices, turn {turn + 1} of {repeat}"
        first = turn * MEASURED_ITERATIONS
        turns.append(pool.run(train_emulated, model, target_runs, first, word, on_progress=on_progress))
    every_turn = [turn for by_rank in turns for of_rank in by_rank for turn in of_rank]
    conditions = _conditions(every_turn, slow_downs, host_ns)
    conditions.check()
    rows = []
    for number, (configuration, prediction) in enumerate(predicted.items()):
        measured = [Measurement(by_rank[0][number].times_ns) for by_rank in turns]
        rows.append(_in_original(make_row(name, configuration, prediction, measured), scale))
    report = replace(summarize(rows, digest), scale_model=scale, conditions=conditions)
    report.save(out)
    return report


def message_sizes(trace: Trace, configurations: Sequence[Configuration]) -> MessageSizes:
    """Return the message sizes to calibrate for these configurations; see `SIZE_RATIO`."""
    all_reduce, two, broadcast = set[int](), set[int](), set[int]()
    recorded = recorded_model(trace)
    for policy in map(policy_of, configurations):
        collectives = build_schedule(policy, recorded, buckets_of(policy, recorded)).collectives
        broadcast |= {one.size_bytes for one in collectives if one.transport == "broadcast"}
        reduced = [one.size_bytes for one in collectives if one.transport != "broadcast"]
        all_reduce.update(reduced)
        if len(reduced) > 1:
            two.update(reduced)
    two_spaced = spaced(two)
    return MessageSizes(tuple(sorted({*spaced(all_reduce), *two_spaced})), two_spaced, spaced(broadcast))


def spaced(sizes_bytes: Iterable[int]) -> tuple[int, ...]:
    """Return the smallest and the largest size, and others between them at a ratio of at least `SIZE_RATIO`.

    Sizes are multiples of 4 and at least 4, because messages of float32 are measured.
    """
    sizes = sorted({max(4, size - size % 4) for size in sizes_bytes})
    kept = sizes[:1]
    for size in sizes[1:-1]:
        if size >= SIZE_RATIO * kept[-1] and SIZE_RATIO * size <= sizes[-1]:
            kept.append(size)
    return (*kept, *sizes[1:][-1:])


def _host_ns(pool: RankPool, model: str, trace: Trace, fabric: Fabric, on_progress: Progress) -> int:
    """Return the nanoseconds by which the host prolongs an iteration, apart from the copies and launches in `fabric`.

    Measured with the real reducer in groups of one rank, so without any network, and compared with the prediction.
    """
    on_progress("measuring the work of the host", 0, 1)
    measured_ns = pool.run(time_without_network, model)[0]
    alone = fabric.model_copy(
        update={"all_reduce": (Timing(world_size=1, size_bytes=0, ns=0),), "broadcast": (), "sharing": ()}
    )
    predicted_ns = predict_one(trace, alone, Configuration(float("inf")), 1).samples_ns
    pairs = zip(measured_ns, cycle(predicted_ns), strict=False)  # iterations beyond the trace repeat its first ones
    return max(0, median_ns(measured - predicted for measured, predicted in pairs))


def with_longer_steps(trace: Trace, by_ns: int) -> Trace:
    """Return a trace in which each iteration takes `by_ns` longer after its backward pass."""
    ranks = []
    for rank in trace.ranks:
        longer = [
            one.shifted(number * by_ns).model_copy(update={"end_ns": one.end_ns + (number + 1) * by_ns})
            for number, one in enumerate(rank.iterations)
        ]
        ranks.append(rank.model_copy(update={"iterations": tuple(longer)}))
    return trace.model_copy(update={"ranks": tuple(ranks)})


def _slow_downs(pool: RankPool, model: str, sizes: MessageSizes, on_progress: Progress) -> tuple[float, float]:
    on_progress("checking slow-downs", 0, 1)
    size = sizes.all_reduce[len(sizes.all_reduce) // 2]
    by_rank = pool.run(time_slow_downs, model, size, SLOW_DOWN_ROUNDS)
    device, _ = slowdown_factor([of_rank.passes for of_rank in by_rank])
    network, _ = slowdown_factor([of_rank.collectives for of_rank in by_rank])
    return device, network


def _conditions(turns: Sequence[EmulatedTurn], slow_downs: tuple[float, float], host_ns: int) -> Conditions:
    overslept = np.concatenate([turn.overslept_ns for turn in turns])
    p50, p90, p99 = (round(quantile) for quantile in np.quantile(overslept, [0.5, 0.9, 0.99]))
    shortest_ns = min(ns for turn in turns for ns in turn.times_ns)
    return Conditions(min(turn.idle for turn in turns), (p50, p90, p99), shortest_ns, *slow_downs, host_ns)


def _in_original(row: Row, scale: ScaleModel) -> Row:
    """Convert a row's times from those of the scale model."""

    def both(times_ns: tuple[int, int]) -> tuple[int, int]:
        return scale.original_ns(times_ns[0]), scale.original_ns(times_ns[1])

    return replace(
        row,
        turns=tuple(Measurement(tuple(map(scale.original_ns, turn.times_ns))) for turn in row.turns),
        measured_ns=scale.original_ns(row.measured_ns),
        quartiles_ns=both(row.quartiles_ns),
        paired_ns=scale.original_ns(row.paired_ns),
        paired_quartiles_ns=both(row.paired_quartiles_ns),
        predicted_ns=scale.original_ns(row.predicted_ns),
        interval_ns=both(row.interval_ns),
    )


# Rank bodies


def prepare_network(_rank: int, _world_size: int) -> None:
    """Connect this rank to the others, and keep its network threads from delaying the emulated devices."""
    meet()
    let_network_threads_yield()


ITERATIONS_WITHOUT_NETWORK = 6


def time_without_network(rank: int, world_size: int, model: str) -> list[int]:
    """Return the nanoseconds of each recorded iteration on the slowest rank, without communication between ranks."""
    alone = [dist.new_group([member]) for member in range(world_size)][rank]
    trainer = Trainer(model, rank)
    assert trainer.device is not None
    ddp = DistributedDataParallel(trainer.module, process_group=alone, bucket_cap_mb=float("inf"))
    ddp.reducer.observers.append(trainer.device.observer)
    trainer.device.next_iteration = -1
    times_ns = []
    for _ in range(1 + ITERATIONS_WITHOUT_NETWORK):
        meet()
        times_ns.append(time_ns(trainer.step, ddp))
    ddp.reducer.detach()
    dist.destroy_process_group(alone)
    return list(of_slowest_rank(times_ns))[1:]


PASSES = 2
"""Passes of the device that a queue of all-reduces lasts for."""


def time_slow_downs(rank: int, _world_size: int, model: str, size_bytes: int, rounds: int) -> SlowDownTimes:
    """Time this rank's passes and its all-reduces, alone and at the same time.

    Args:
        rank: This rank.
        model: As for `--model`: an emulated one.
        size_bytes: Bytes of an all-reduce.
        rounds: Number of times that each is measured.
    """
    trainer, times = Trainer(model, rank), SlowDownTimes(ContentionTimes([], []), ContentionTimes([], []))
    buffer = MessageBuffer(4 * size_bytes)
    pass_ns, all_reduce_ns = of_slowest_rank(
        [time_ns(trainer.step, trainer.module), time_ns(dist.all_reduce, buffer.messages(size_bytes, 1)[0])]
    )
    messages = buffer.messages(size_bytes, max(4, PASSES * pass_ns // all_reduce_ns))
    for _ in range(rounds):
        meet()
        times.passes.alone.append([time_ns(trainer.step, trainer.module) for _ in range(PASSES)])
        meet()
        queue = AllReduceQueue(messages, all_at_once=True)
        queue.wait()
        times.collectives.alone.append([queue.ns_per_all_reduce()])
        meet()
        queue = AllReduceQueue(messages, all_at_once=True)
        passes_ns = []
        while queue.running:
            passes_ns.append(time_ns(trainer.step, trainer.module))
        queue.wait()
        times.passes.contended.append(passes_ns)
        times.collectives.contended.append([queue.ns_per_all_reduce()])
    return times


def train_emulated(
    rank: int, _world_size: int, model: str, target_runs: Sequence[TargetRun], first: int, progress_word: str
) -> list[EmulatedTurn]:
    """Train one turn of each target run.

    Args:
        rank: This rank.
        model: As for `--model`: an emulated one.
        target_runs: The configurations to train under, in this order.
        first: Index of the recorded iteration from which each target run is measured.
        progress_word: Label for the progress reports.
    """
    trainer = Trainer(model, rank)
    assert trainer.device is not None
    clock, turns = trainer.device.observer, []
    for done, run in enumerate(target_runs):
        if rank == 0:
            report_progress(progress_word, done, len(target_runs))
        trainer.device.next_iteration = -1  # buckets are rebuilt in the last iteration's ready order, as predicted
        with warmed_up(trainer, run) as ddp:
            trainer.device.next_iteration = first
            slept, before = len(clock.overslept_ns), psutil.cpu_times()
            times_ns = time_iterations(trainer, ddp)
            idle = _idle(before, psutil.cpu_times())
        turns.append(EmulatedTurn(times_ns, idle, clock.overslept_ns[slept:]))
    return turns


def _idle(before: Any, after: Any) -> float:
    """Return the fraction of processor time between two readings of `psutil.cpu_times` that was idle."""
    spent = {name: getattr(after, name) - getattr(before, name) for name in after._fields}
    total = sum(ns for name, ns in spent.items() if not name.startswith("guest"))  # counted in user time already
    return (spent["idle"] + spent.get("iowait", 0.0)) / total if total else 1.0
