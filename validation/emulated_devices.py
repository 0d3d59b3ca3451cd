"""Emulated devices by the clock: ranks that sleep for the times of a trace in place of computing.

The module, its gradients, the reducer and the network are real; `ddplab emulate` runs the same module in virtual
time. As the name of a model, `validation.emulated_devices:TRACE` is a device that takes the times of this file.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddplab.calibration.collective_times import AllReduceQueue, adjacent_messages, last_to_last_ns
from ddplab.calibration.reducer_costs import GRADIENT_BYTES, pack_bucket
from ddplab.calibration.repeated_timing import clock_ns, median_ns, meet, of_slowest_rank, share_clock
from ddplab.emulation.emulated_device import Activity, EmulatedModel, EmulatedOptimizer, IterationTimes
from ddplab.models import Model
from ddplab.reference.buckets import Bucket
from ddplab.reference.launch import report_progress
from ddplab.reference.recording.reducer_observer import Future, Observer
from ddplab.reference.trace import Trace
from ddplab.simulator.workload.compute_times import recorded_model
from ddplab.training_runs import (
    MEASURED_ITERATIONS,
    WARM_UP,
    TargetRun,
    Trainer,
    Turn,
    record_iterations,
    time_iterations,
    warmed_up,
)

EMULATED = f"{__name__}:"
"""Prefix of the path of a trace; together they are the name of a model."""


def __getattr__(path: str) -> Callable[[], Model]:
    """Return a function that makes the device of a trace, as `ddplab.models` finds functions by their names."""
    if not path.endswith((".json", ".json.gz")):
        raise AttributeError(f"expected the path of a trace, got {path}")
    return partial(_device_of, path)


def _device_of(path: str) -> Model:
    training = EmulatedTraining(Trace.load(path), dist.get_rank() if dist.is_initialized() else 0)
    return training.model, training


class WallClock(Observer):
    """Sleeps until the emulated device would have finished, with absolute deadlines and without holding the GIL.

    As on a GPU's stream, the work of the host beside the device costs the device no time: within a backward pass,
    each deadline follows from the one before, however late the host woke, and the host does not wait for the end of
    the forward pass. At the start of a forward pass and of an optimiser step the device has waited for the host, so
    these start at the present time if that is later. The stream of a GPU also copies gradients into buckets. An
    observer of ddplab's reducer, the clock therefore counts the time in which the host packs and launches buckets as
    time of the device.

    Attributes:
        overslept_ns: By how much each sleep ended after its deadline, also one that had passed before the sleep.
        due_ns: When the device will have finished, or finished last, by `clock_ns`.
    """

    def __init__(self) -> None:
        self.overslept_ns: list[int] = []
        self.due_ns = 0
        self._copying_since_ns = 0
        least_timer_slack()

    @contextmanager
    def computing(self, duration_ns: int, activity: Activity) -> Iterator[None]:
        """Sleep at the end of the context until `duration_ns` after the last deadline; see the class.

        A forward pass only moves the deadline.
        """
        if activity != "backward":
            self.due_ns = max(self.due_ns, clock_ns())
        self.due_ns += duration_ns
        yield
        if duration_ns and activity != "forward":
            remaining_ns = self.due_ns - clock_ns()
            if remaining_ns > 0:
                time.sleep(remaining_ns / 1e9)
            self.overslept_ns.append(clock_ns() - self.due_ns)

    def bucket_packing(self, bucket: int) -> None:
        """Begin to count time of the host as time of the device."""
        self._copying_since_ns = clock_ns()

    def bucket_ready(self, bucket: int, future: Future | None = None) -> None:
        """Stop to count: the bucket may have to wait for those before it, or has been launched."""
        self.due_ns += clock_ns() - self._copying_since_ns

    bucket_launching, bucket_launched = bucket_packing, bucket_ready


def least_timer_slack() -> None:
    """Let sleeps of this thread end as close to their deadlines as Linux can; by default they end up to 50 us later.

    Does nothing without Linux's prctl(2).
    """
    pr_set_timerslack, least_ns = 29, 1
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is not None:
        prctl(pr_set_timerslack, least_ns)


class EmulatedTraining:
    """A `loss_fn` (see `ddplab.models`) that trains an emulated model through the recorded iterations, in a circle.

    Rank r emulates rank r of the trace, or starts again at rank 0 if there are more ranks.

    Attributes:
        next_iteration: Index of the recorded iteration that is next.
        observer: To be appended to the observers of ddplab's reducer.
    """

    def __init__(self, trace: Trace, rank: int) -> None:
        recorded = recorded_model(trace, unused_allowed=True).compute_times
        own, count = recorded[rank % len(recorded)], min(len(of_rank.iterations) for of_rank in trace.ranks)
        self._iterations = [IterationTimes.of_rank(own[number]) for number in range(count)]
        self.next_iteration = 0
        self.batch = trace.workload.batch
        self.observer = WallClock()
        self.model = EmulatedModel(trace.workload, self.observer.computing)

    def __call__(self, module: nn.Module) -> Tensor:
        """Run the forward pass of the next recorded iteration; returns the loss."""
        self.model.times = self._iterations[self.next_iteration % len(self._iterations)]
        self.next_iteration += 1
        return module()  # type: ignore[no-any-return]

    def optimizer(self) -> torch.optim.Optimizer:
        """An optimiser whose step takes the recorded time and changes nothing."""
        return EmulatedOptimizer(self.model.parameters(), self.model)


# Bodies of ranks


def record_device(_rank: int, _world_size: int, model: str, iterations: int) -> Trace:
    """Record what an emulated device and the work of its host take, as `ddplab.training_runs.record_computation`."""
    trainer = Trainer(model, dist.get_rank())
    meet()  # connects this rank to the others
    let_network_threads_yield()  # to the device, now and in training
    _training(trainer).next_iteration = -WARM_UP
    return record_iterations(trainer, model, iterations)


def train_device_turn(
    rank: int, world_size: int, model: str, target_runs: Sequence[TargetRun], turn: int, progress_word: str
) -> list[tuple[Turn, list[int]]]:
    """Train one turn of each target run; return also how late sleeps ended, in nanoseconds.

    Each turn trains the recorded iterations that follow on those of the turn before.
    """
    trainer = Trainer(model, rank)
    device = _training(trainer)
    measured = []
    for done, run in enumerate(target_runs):
        share_clock(rank, world_size)
        if rank == 0:
            report_progress(progress_word, done, len(target_runs))
        device.next_iteration = -1  # buckets are rebuilt in the last iteration's ready order, as predicted
        with warmed_up(trainer, run, device.observer) as ddp:
            device.next_iteration = turn * MEASURED_ITERATIONS
            device.observer.overslept_ns.clear()
            times_ns = time_iterations(trainer, ddp)
        measured.append((Turn(times_ns), list(device.observer.overslept_ns)))
    return measured


def _training(trainer: Trainer) -> EmulatedTraining:
    assert isinstance(trainer.loss_fn, EmulatedTraining)
    return trainer.loss_fn


PAUSE_NS = 3_000_000
LAUNCHES_PER_ROUND = 10


def time_launch_beside_network(_rank: int, _world_size: int, size_bytes: int, rounds: int) -> int:
    """Return the nanoseconds to pack and launch a bucket with one small gradient.

    Each launch comes after a pause and while all-reduces are in flight, as between the gradients of a device that
    leaves the host idle: the processor's caches have lost the reducer's code and data, and the threads of the network
    take time from the launch. Each round of `LAUNCHES_PER_ROUND` launches counts with the rank whose launches took
    longest in total, because ranks do not wait for each other after every launch. All-reduces in flight have
    `size_bytes`.
    """
    group = dist.group.WORLD
    assert group is not None
    parameter = nn.Parameter(torch.ones(GRADIENT_BYTES[0] // 4))
    parameter.grad = torch.ones_like(parameter)
    buckets = [Bucket([0], [parameter]) for _ in range(LAUNCHES_PER_ROUND)]
    memory = torch.ones(size_bytes)  # four messages
    first, again = adjacent_messages(memory, size_bytes, 2)
    dist.all_reduce(first)  # the first one of a size is slow
    all_reduce_ns = last_to_last_ns(dist.all_reduce, again)
    in_flight = adjacent_messages(memory, size_bytes, 1 + LAUNCHES_PER_ROUND * PAUSE_NS // all_reduce_ns)
    launching_ns = []
    for _ in range(rounds):
        meet()
        queue, launched, taken_ns = AllReduceQueue(in_flight), [], 0
        for bucket in buckets:
            time.sleep(PAUSE_NS / 1e9)
            start = clock_ns()
            bucket.reset()
            pack_bucket(bucket)
            launched.append(bucket.all_reduce(group))
            taken_ns += clock_ns() - start
        queue.wait()
        for future in launched:
            future.wait()
        launching_ns.append(taken_ns // LAUNCHES_PER_ROUND)
    return median_ns(of_slowest_rank(launching_ns))


def let_network_threads_yield() -> None:
    """Keep Gloo's network threads from running while other threads of the ranks want to.

    If a message arrives before its receiver is ready, the network thread polls for it without a pause, and so may
    keep the receiver from its core until the scheduler's next tick: a message of 32 KiB then takes 4 ms instead of
    1 ms between four ranks on two cores. As batch threads they no longer preempt others. A model that computes would
    delay the network instead, so this is for ranks that hardly compute. Does nothing without Linux.
    """
    if sys.platform == "linux":
        for thread in Path("/proc/self/task").iterdir():
            if (thread / "comm").read_text().strip() == "gloo_tcp_loop":
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
