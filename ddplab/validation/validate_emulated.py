"""Validate on emulated devices: predict, then train on real ranks whose computation sleeps for recorded times.

The reducer, the collectives and the links are real. Only the computation is emulated. It hardly needs the processor,
always has the same speed, and overlaps with communication as on a GPU. The times of the trace therefore hold during
training, and only the collectives are calibrated. Whether the machine is fast enough for the emulated devices is
measured too (`Conditions`); if it is not, nothing is reported.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import psutil
import torch.distributed as dist

from reference.launch import Progress, RankPool, let_network_threads_yield, no_progress, report_progress
from reference.trace import Trace
from simulator.fabric import Fabric, Processor, Sharing, Timing
from simulator.fabric.processor_costs import EMULATED_MODEL_ERROR
from simulator.schedule.policy import Policy
from simulator.schedule.schedule import build_schedule
from simulator.workload.compute_times import recorded_model

from ..calibration.calibrate import REPEATS, measure_collectives, measure_hooks
from ..calibration.collective_times import AllReduceQueue, MessageBuffer, MessageSizes, affordable_repeats
from ..calibration.reducer_costs import time_copies, time_launch_beside_network
from ..calibration.repeated_timing import (
    ContentionTimes,
    median_ns,
    meet,
    of_slowest_rank,
    relative_spread,
    slowdown_factor,
    time_ns,
)
from ..calibration.slow_downs import ContinuousTimes
from ..emulation.time_dilation import ScaleModel
from ..emulation.wall_clock_network import WallGroup, modelled_network
from ..models import EMULATED
from .emulated_host_overhead import host_ns_by_iteration, time_one_all_reduce_each, with_longer_steps, with_packing
from .machine_conditions import Conditions, checked_slow_downs
from .training_runs import MEASURED_ITERATIONS, DeviceTimes, TargetRun, Trainer, Turn, time_iterations, warmed_up
from .validate import target_run, train_turns, write_predictions
from .validation_report import (
    PREDICTED_TRACE_FILE,
    Configuration,
    Measurement,
    ValidationReport,
    make_row,
    policy_of,
    predict_targets,
    summarize,
)

Result = TypeVar("Result")

LAUNCH_ROUNDS = 8
PAUSE_S = 0.02
"""Pause before a collective is calibrated; emulated devices leave the processor idle."""
SIZE_RATIO = 1.5
"""Least ratio of two message sizes that are calibrated; between them, costs are interpolated."""


@dataclass(frozen=True)
class EmulatedRanks:
    """Ranks that emulate devices, and what was calibrated on them; sizes and times are those of the scale model.

    Attributes:
        pool: The ranks.
        model: Name of the emulated model, for `Trainer`.
        trace: The computation of the devices.
        predicted_from: The trace to predict from: with the work of the host.
        fabric: Costs of collectives and of the processor, to predict from.
        modelled: Costs of the collectives of a `modelled_network`. None: the network is real.
        slow_downs: Factors by which the network slows the device down, and the device the network.
        host_ns: By how much the work of the host prolongs an iteration.
    """

    pool: RankPool
    model: str
    trace: Trace
    predicted_from: Trace
    fabric: Fabric
    modelled: Fabric | None
    slow_downs: tuple[float, float]
    host_ns: int

    @classmethod
    def calibrate(
        cls,
        pool: RankPool,
        trace: Trace,
        policies: Sequence[Policy],
        *,
        out: Path,
        scale: ScaleModel,
        calibrated: Fabric | None = None,
        modelled: Fabric | None = None,
        on_progress: Progress = no_progress,
    ) -> Self:
        """Calibrate what the predictions of these policies need; both policies and `trace` are in the scale model.

        `out` gets `trace.json.gz`, `fabric.json` and `predicted_from.json.gz`. The other arguments, and the errors,
        are those of `validate_emulated`.
        """
        trace.save(out / "trace.json.gz")
        model = f"{EMULATED}{out / 'trace.json.gz'}"
        sizes = message_sizes(trace, policies)
        message_bytes = sizes.all_reduce[len(sizes.all_reduce) // 2]
        if modelled is not None:
            if calibrated is not None:
                raise ValueError("modelled: expected no calibrated costs with a modelled network, got both")
            exact_sizes = every_message_size(trace, policies)
            modelled = calibrated = fabric_in_model(modelled, exact_sizes, scale, pool.world_size)
        run_on_ranks = partial(pool.run, on_network, modelled)
        pool.run(prepare_network)
        on_progress("measuring the work of the host", 0, 1)
        one_all_reduce_each = run_on_ranks(time_one_all_reduce_each, model, message_bytes, PAUSE_S)[0]
        if calibrated is None:
            fabric = _measure_network(pool, trace, sizes, on_progress)
        else:
            copies = pool.run(time_copies, REPEATS, sum(trace.sizes_bytes))[0]
            fabric = calibrated.model_copy(update={"processor": Processor(**copies)})
        launch_ns = run_on_ranks(time_launch_beside_network, message_bytes, LAUNCH_ROUNDS)[0]
        fabric = fabric.with_processor(launch_ns=launch_ns)
        fabric = measure_hooks(pool, fabric, [one.hook.name for one in policies], model, on_progress=on_progress)
        on_progress("checking slow-downs", 0, 1)
        slow_downs = checked_slow_downs(lambda: _slow_downs(run_on_ranks(time_slow_downs, model, message_bytes)))
        on_progress("measuring the work of the host", 0, 1)
        one_all_reduce_each += run_on_ranks(time_one_all_reduce_each, model, message_bytes, PAUSE_S)[0]
        fabric = with_packing(fabric, trace, one_all_reduce_each).with_processor(
            iteration_spread=relative_spread([one.iteration_ns for one in one_all_reduce_each]),
            model_error=EMULATED_MODEL_ERROR,
        )
        fabric.save(out / "fabric.json")
        host_ns = host_ns_by_iteration(trace, fabric, pool.world_size, one_all_reduce_each)
        predicted_from = with_longer_steps(trace, host_ns)
        predicted_from.save(out / PREDICTED_TRACE_FILE)
        return cls(pool, model, trace, predicted_from, fabric, modelled, slow_downs, median_ns(host_ns))

    def train(
        self, target_runs: Sequence[TargetRun], turn: int, word: str, on_progress: Progress
    ) -> list[list[Turn]]:
        """Train one turn of each target run; each turn trains the iterations that follow on those of the one before.

        Returns what each rank measured in each run.
        """
        arguments = self.model, target_runs, turn * MEASURED_ITERATIONS, word
        return self.pool.run(on_network, self.modelled, train_emulated, *arguments, on_progress=on_progress)

    def check_conditions(self, turns: Iterable[Turn]) -> Conditions:
        """Return the conditions of all turns of all ranks.

        Raises:
            ConditionsError: One does not hold.
        """
        turns = list(turns)
        devices = [turn.device for turn in turns if turn.device is not None]
        overslept = np.concatenate([device.overslept_ns for device in devices])
        p50, p90, p99 = (round(quantile) for quantile in np.quantile(overslept, [0.5, 0.9, 0.99]))
        idle, late_ns = min(device.idle for device in devices), max(device.late_ns for device in devices)
        shortest_ns = min(ns for turn in turns for ns in turn.measurement.times_ns)
        conditions = Conditions(idle, (p50, p90, p99), late_ns, shortest_ns, *self.slow_downs, self.host_ns)
        conditions.check()
        return conditions


def validate_emulated(
    pool: RankPool,
    trace: Trace,
    configurations: Sequence[Configuration],
    *,
    scale: ScaleModel,
    out: Path,
    repeat: int = 3,
    calibrated: Fabric | None = None,
    modelled: Fabric | None = None,
    on_progress: Progress = no_progress,
) -> ValidationReport:
    """Calibrate the collectives, write the predictions, and only then train emulated devices and measure.

    Rank r emulates rank r of the trace, or starts again at rank 0 if there are more. `out` gets the files of the
    scale model, `trace.json.gz`, `predicted_from.json.gz` (with the work of the host), `fabric.json`,
    `predictions.json` and `samples.parquet`, and `report.json` and `report.csv` with times of the original.

    Args:
        pool: The ranks to train on; the rate of their links is that of the scale model.
        trace: The computation to emulate.
        configurations: Configurations of the original.
        scale: The scale model that runs.
        out: Folder for the files.
        repeat: Number of turns of each configuration; each trains the iterations that follow on those of the turn
            before.
        calibrated: Costs of the collectives in the scale model, such as `extrapolated` returns. None: they are
            measured on these ranks, as everything else always is.
        modelled: Costs of the original's collectives for a `modelled_network`. None: the network is real.
        on_progress: Called with each step's name, the parts done and all parts.

    Raises:
        ConditionsError: The machine is too slow, so there is no report.
        RankError: A rank failed.
        ValueError: There is no such hook, or some parameter got no gradient.
    """
    model_trace, name = scale.trace(trace, repeat * MEASURED_ITERATIONS), trace.workload.model
    configurations = list(dict.fromkeys(configurations))
    in_model = [one.in_model(scale) for one in configurations]
    ranks = EmulatedRanks.calibrate(
        pool,
        model_trace,
        list(map(policy_of, in_model)),
        out=out,
        scale=scale,
        calibrated=calibrated,
        modelled=modelled,
        on_progress=on_progress,
    )
    targets = predict_targets(ranks.predicted_from, ranks.fabric, in_model, pool.world_size)
    predicted = dict(zip(configurations, targets, strict=True))
    digest = write_predictions(out / "predictions.json", name, predicted)
    target_runs = [target_run(model_trace, configuration) for configuration in in_model]
    every_turn: list[Turn] = []

    def train(turn: int) -> list[list[Turn]]:
        word = f"{name}: training emulated devices, turn {turn + 1} of {repeat}"
        by_rank = ranks.train(target_runs, turn, word, on_progress)
        every_turn.extend(chain(*by_rank))
        return by_rank

    measured = train_turns(name, configurations, repeat, train, out)
    conditions = ranks.check_conditions(every_turn)
    rows = [
        make_row(name, *of_one, turns).in_original(scale)
        for of_one, turns in zip(predicted.items(), measured, strict=True)
    ]
    summary = summarize(rows, digest, world_size=pool.world_size)
    report = replace(summary, scale_model=scale, conditions=conditions)
    report.save(out)
    return report


def calibrate_network(
    pool: RankPool,
    trace: Trace,
    configurations: Sequence[Configuration],
    *,
    scale: ScaleModel,
    on_progress: Progress = no_progress,
) -> Fabric:
    """Measure the collectives of these configurations on the ranks of `pool`; arguments as of `validate_emulated`.

    `extrapolated` makes a fabric for a further world size from several results.
    """
    model_trace = scale.trace(trace, 1)
    sizes = message_sizes(model_trace, [policy_of(one.in_model(scale)) for one in configurations])
    pool.run(prepare_network)
    return _measure_network(pool, model_trace, sizes, on_progress)


def _measure_network(pool: RankPool, trace: Trace, sizes: MessageSizes, on_progress: Progress) -> Fabric:
    gradient_bytes = sum(trace.sizes_bytes)
    return measure_collectives(pool, sizes, REPEATS, on_progress, gradient_bytes=gradient_bytes, pause_s=PAUSE_S)


def extrapolated(calibrated: Sequence[Fabric], world_size: int) -> Fabric:
    """Make a fabric for `world_size` ranks from calibrations of other numbers of ranks.

    The time of two all-reduces at a time is extrapolated like that of one. Weights of sizes are those of the largest
    calibrated world size. All calibrations have the same message sizes.

    Raises:
        ValueError: Two calibrations have the same world size.
    """
    alone = Fabric.merged(*calibrated).model_copy(update={"extrapolate": True})
    two_at_a_time = tuple(
        Timing(
            world_size=n, size_bytes=row.size_bytes, ns=round(row.factor * fabric.all_reduce_ns(row.size_bytes, n))
        )
        for fabric in calibrated
        for n in fabric.world_sizes
        for row in fabric.sharing
    )
    two = alone.model_copy(update={"all_reduce": two_at_a_time})
    largest = max(calibrated, key=attrgetter("world_sizes"))
    sharing = tuple(
        Sharing.of_times(
            size,
            two_at_a_time_ns=two.all_reduce_ns(size, world_size),
            alone_ns=alone.all_reduce_ns(size, world_size),
            weight=largest.link_share(size, world_size).weight,
        )
        for size in sorted({row.size_bytes for row in two_at_a_time})
    )
    return alone.model_copy(update={"sharing": sharing})


def fabric_in_model(original: Fabric, sizes: MessageSizes, scale: ScaleModel, world_size: int) -> Fabric:
    """Return the costs of messages of these sizes in the scale model, as a measured table."""

    def costs(cost_ns: Callable[[int, int], int], sizes_bytes: Iterable[int]) -> tuple[Timing, ...]:
        times = ((size, scale.dilation * cost_ns(scale.original_bytes(size), world_size)) for size in sizes_bytes)
        return tuple(Timing(world_size=world_size, size_bytes=size, ns=round(ns)) for size, ns in times)

    return Fabric(
        all_reduce=costs(original.all_reduce_ns, sizes.all_reduce),
        broadcast=costs(original.broadcast_ns, sizes.broadcast),
        sharing=tuple(
            Sharing(size_bytes=size, factor=share.slow_down, weight=share.weight)
            for size in sizes.two
            for share in [original.link_share(scale.original_bytes(size), world_size)]
        ),
        concurrency=original.concurrency,
        library=original.library,
        source=original.source,
    )


def every_message_size(trace: Trace, policies: Iterable[Policy]) -> MessageSizes:
    """Return the sizes of all messages under these policies."""
    all_reduce, two, broadcast = set[int](), set[int](), set[int]()
    recorded = recorded_model(trace)
    for policy in policies:
        collectives = build_schedule(policy, recorded).collectives
        broadcast |= {one.size_bytes for one in collectives if one.transport == "broadcast"}
        reduced = [one.size_bytes for one in collectives if one.transport != "broadcast"]
        all_reduce.update(reduced)
        if len(reduced) > 1:
            two.update(reduced)
    return MessageSizes(tuple(sorted(all_reduce)), tuple(sorted(two)), tuple(sorted(broadcast)))


def message_sizes(trace: Trace, policies: Iterable[Policy]) -> MessageSizes:
    """Return the message sizes to calibrate for these policies; see `SIZE_RATIO`."""
    sizes = every_message_size(trace, policies)
    two = spaced(sizes.two)
    return MessageSizes(tuple(sorted({*spaced(sizes.all_reduce), *two})), two, spaced(sizes.broadcast))


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


def _slow_downs(by_rank: Sequence[ContinuousTimes]) -> tuple[float, float]:
    """Return the factors by which the network slows the device down, and the device the network."""
    (device, _), (network, _) = (slowdown_factor(times) for times in zip(*by_rank, strict=True))
    return device, network


# Rank bodies


def on_network(
    rank: int, world_size: int, modelled: Fabric | None, body: Callable[..., Result], *arguments: Any
) -> Result:
    """Run a rank body on a modelled network, or on the real one if there is no fabric."""
    with nullcontext() if modelled is None else modelled_network(modelled):
        return body(rank, world_size, *arguments)


def prepare_network(_rank: int, _world_size: int) -> None:
    """Connect this rank to the others, and keep its network threads from delaying the emulated devices."""
    meet()
    let_network_threads_yield()


PASSES = 2
"""Passes of the device that a queue of all-reduces lasts for."""
LEAST_ALL_REDUCES = 4
"""All-reduces in the shortest queue."""
ACTIVITIES = 3
"""Passes alone, a queue alone, and both at the same time; each takes about `PASSES` passes."""
FEWEST_ROUNDS, MOST_ROUNDS = 3, 15
SLOW_DOWN_BUDGET_NS = 3_000_000_000


def time_slow_downs(rank: int, _world_size: int, model: str, size_bytes: int) -> ContinuousTimes:
    """Time passes of an emulated model and all-reduces of `size_bytes`, alone and at the same time."""
    trainer, times = Trainer(model, rank), ContinuousTimes(ContentionTimes([], []), ContentionTimes([], []))
    buffer = MessageBuffer(4 * size_bytes)
    trial = AllReduceQueue(buffer.messages(size_bytes, LEAST_ALL_REDUCES))
    trial.wait()  # in a queue, because the first all-reduce of a size takes much longer than the next
    pass_ns, all_reduce_ns = of_slowest_rank([time_ns(trainer.step, trainer.module), trial.ns_per_all_reduce()])
    messages = buffer.messages(size_bytes, max(LEAST_ALL_REDUCES, PASSES * pass_ns // all_reduce_ns))
    for _ in range(
        affordable_repeats(ACTIVITIES * PASSES * pass_ns, MOST_ROUNDS, SLOW_DOWN_BUDGET_NS, at_least=FEWEST_ROUNDS)
    ):
        meet()
        times.passes.alone.append([time_ns(trainer.step, trainer.module) for _ in range(PASSES)])
        meet()
        queue = AllReduceQueue(messages)
        queue.wait()
        times.collectives.alone.append([queue.ns_per_all_reduce()])
        meet()
        queue = AllReduceQueue(messages)
        passes_ns = [time_ns(trainer.step, trainer.module)]  # also if this thread gets no core before the queue ends
        while queue.running:
            passes_ns.append(time_ns(trainer.step, trainer.module))
        queue.wait()
        times.passes.contended.append(passes_ns)
        times.collectives.contended.append([queue.ns_per_all_reduce()])
    return times


def train_emulated(
    rank: int, _world_size: int, model: str, target_runs: Sequence[TargetRun], first: int, progress_word: str
) -> list[Turn]:
    """Train one turn of each target run on an emulated model, from the `first` recorded iteration on."""
    trainer = Trainer(model, rank)
    assert trainer.device is not None
    clock, turns = trainer.device.observer, []
    late_ns = dist.group.WORLD.late_ns if isinstance(dist.group.WORLD, WallGroup) else []
    for done, run in enumerate(target_runs):
        if rank == 0:
            report_progress(progress_word, done, len(target_runs))
        trainer.device.next_iteration = -1  # buckets are rebuilt in the last iteration's ready order, as predicted
        with warmed_up(trainer, run) as ddp:
            trainer.device.next_iteration = first
            slept = len(clock.overslept_ns)
            late_ns.clear()
            psutil.cpu_times_percent()  # the next call counts from this one
            times_ns, iterations = time_iterations(trainer, ddp)
            spent = psutil.cpu_times_percent()
        idle = (spent.idle + getattr(spent, "iowait", 0.0)) / 100
        device = DeviceTimes(idle, clock.overslept_ns[slept:], median_ns(late_ns or [0]))
        turns.append(Turn(Measurement(times_ns), iterations, device))
    return turns
