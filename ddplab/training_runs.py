"""Rank bodies that train: `record_computation` records a trace, `train_turn` measures target runs."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from . import models
from .calibration.comm_hook_costs import WARM_UP as WARM_UP_OF_HOOKS
from .calibration.comm_hook_costs import real_hook
from .calibration.repeated_timing import in_ns, meet, of_slowest_rank, read_clock, share_clock
from .reference.data_parallel import DistributedDataParallel
from .reference.launch import rank_device, report_progress
from .reference.parameters import trainable_parameters
from .reference.recorder import record
from .reference.recording.reducer_observer import Observer
from .reference.trace import PHASES, Iteration, Trace
from .simulator.schedule.comm_hook_messages import NO_HOOK

WARM_UP = 2
SAMPLED_ITERATIONS = 10
"""First iterations of torch's class, after each of which the host waits for a GPU to time it."""
RECORDED_ITERATIONS = 8
MEASURED_ITERATIONS = 3
"""Measured iterations in each turn of a target run, after the warm-up iterations."""


class Trainer:
    """A model with its batch and optimiser on this rank."""

    def __init__(self, model: str, rank: int) -> None:
        torch.manual_seed(rank)  # each rank has its own batch; data parallelism makes the parameters equal
        self.name = model
        self.module, self.loss_fn = models.build(model)
        self.batch: int | None = models.batch_of(model, self.loss_fn)
        with models.users_code(model, self.loss_fn, "loss_fn.optimizer() to return an optimiser"):
            self._optimizer = models.optimizer_of(self.module, self.loss_fn)
            self._optimizer.zero_grad()  # raises an error if it is none

    def uses_all_parameters(self) -> bool:
        """Run a forward and a backward pass, and return whether every parameter got a gradient."""
        models.run_batch(self.name, self.module, self.loss_fn)
        got_one = [parameter.grad is not None for parameter in trainable_parameters(self.module).values()]
        self._optimizer.zero_grad()
        return all(got_one)

    def step(self, module: nn.Module) -> None:
        """Train one iteration; `module` is the model itself or its data-parallel wrapper."""
        self.loss_fn(module).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


@cache
def groups_of_one(world: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """Return a group for each rank of the world, which lasts as long; see `comm_hooks.interface`."""
    return [dist.new_group([member], backend="gloo") for member in range(world.size())]


def record_computation(rank: int, _world_size: int, model: str, iterations: int = RECORDED_ITERATIONS) -> Trace:
    """Record iterations without communication on all ranks at the same time, which start each one together.

    Each rank trains under the reducer in a group of its own: its hooks and its buckets in the caches make a backward
    pass on a processor some percent slower. A model with unused parameters, and a GPU, whose host would wait for
    Gloo, are trained without it.
    """
    trainer = Trainer(model, rank)
    assert dist.group.WORLD is not None  # this is a rank
    alone = groups_of_one(dist.group.WORLD)[rank]
    under_reducer = trainer.uses_all_parameters() and rank_device().type != "cuda"
    return record_iterations(trainer, model, iterations, alone if under_reducer else None)


def record_iterations(trainer: Trainer, model: str, iterations: int, alone: dist.ProcessGroup | None = None) -> Trace:
    """Record iterations after a warm-up, with a group under the reducer in this group."""
    with record(trainer.module, model=model, batch=trainer.batch, process_group=dist.group.WORLD) as recording:
        module = trainer.module
        if alone is not None:  # made here, so that packing comes after the recorder's hook on the last gradient
            module = DistributedDataParallel(trainer.module, process_group=alone, bucket_cap_mb=float("inf"))
        for _ in range(WARM_UP + iterations):
            meet()  # as in training, where the slowest rank has the processor to itself at the end of an iteration
            trainer.step(module)
            recording.end_iteration()
        if isinstance(module, DistributedDataParallel):
            module.reducer.detach()
    return last_iterations(recording.trace, iterations, averaged=alone is not None)


def last_iterations(trace: Trace, iterations: int, *, averaged: bool) -> Trace:
    """Return the last iterations; if gradients were averaged, each backward pass ends with its last gradient."""
    ranks = []
    for rank in trace.ranks:
        kept: list[Iteration] = []
        for one in rank.iterations[-iterations:]:
            start_ns = kept[-1].end_ns if kept else 0
            ready_ns = [moment for moment in one.ready_ns if moment is not None]
            averaging_ns = one.backward_end_ns - max(ready_ns, default=one.backward_end_ns) if averaged else 0
            moved = one.shifted(start_ns - one.forward_start_ns)
            after = {name: getattr(moved, name) for name in PHASES[PHASES.index("backward_end_ns") :]}
            earlier = {name: moment - averaging_ns for name, moment in after.items() if moment is not None}
            kept.append(moved.model_copy(update=earlier))
        ranks.append(rank.model_copy(update={"iterations": tuple(kept)}))
    return trace.model_copy(update={"ranks": tuple(ranks)})


class TargetRun(NamedTuple):
    """Arguments of our class, a comm hook, and arguments of torch's class, which then trains after ours."""

    ddp_arguments: dict[str, Any]
    hook_name: str = NO_HOOK.name
    torchs_arguments: dict[str, Any] | None = None


class Turn(NamedTuple):
    """One turn of a target run."""

    times_ns: tuple[int, ...]
    """Nanoseconds of each iteration, from one slowest rank's end to the next; equal on all ranks."""
    torchs_ns: tuple[int, ...] = ()  #: of torch's class, which trained right after ours; empty if it did not


def train_turn(
    rank: int, world_size: int, model: str, target_runs: Sequence[TargetRun], _turn: int, progress_word: str
) -> list[Turn]:
    """Train one turn of each target run, in this order."""
    trainer = Trainer(model, rank)
    measured = []
    for done, run in enumerate(target_runs):
        share_clock(rank, world_size)
        if rank == 0:
            report_progress(progress_word, done, len(target_runs))
        with warmed_up(trainer, run) as ddp:
            times_ns = time_iterations(trainer, ddp)
        torchs = run.torchs_arguments
        measured.append(Turn(times_ns, () if torchs is None else time_torchs_class(trainer, torchs)))
    return measured


@contextmanager
def warmed_up(trainer: Trainer, target_run: TargetRun, *observers: Observer) -> Iterator[DistributedDataParallel]:
    """Wrap the model as the target run says, and train until iterations are alike; observers follow the reducer."""
    ddp = DistributedDataParallel(trainer.module, **target_run.ddp_arguments)
    warm_up = 1 if "plan" in target_run.ddp_arguments else 2  # without a plan, the second iteration rebuilds buckets
    ddp.reducer.observers.extend(observers)
    try:
        if target_run.hook_name != NO_HOOK.name:
            hook, make_state = real_hook(target_run.hook_name)
            ddp.register_comm_hook(make_state(), hook)
            warm_up = WARM_UP_OF_HOOKS
        for _ in range(warm_up):
            trainer.step(ddp)
        yield ddp
    finally:
        ddp.reducer.detach()


def time_iterations(trainer: Trainer, ddp: nn.Module) -> tuple[int, ...]:
    """Train `MEASURED_ITERATIONS` iterations; return the nanoseconds of each.

    A rank that finishes early waits for the others in its next iteration, so the sum of each iteration's longest time
    would exceed the time of the training. The ranks share a clock; those of GPUs are some microseconds apart, which
    moves all ends alike.
    """
    meet()
    ends = [read_clock()]
    for _ in range(MEASURED_ITERATIONS):
        trainer.step(ddp)
        ends.append(read_clock())
    return tuple(end - start for start, end in pairwise(of_slowest_rank(in_ns(*ends))))


def time_torchs_class(trainer: Trainer, ddp_arguments: dict[str, Any]) -> tuple[int, ...]:
    """Train with torch's class as `time_iterations` does with ours, after a warm-up."""
    ddp = nn.parallel.DistributedDataParallel(trainer.module, **ddp_arguments)
    for _ in range(SAMPLED_ITERATIONS if rank_device().type == "cuda" else WARM_UP):
        trainer.step(ddp)
    times_ns = time_iterations(trainer, ddp)
    del ddp
    gc.collect()  # its hooks on the gradients end with it
    return times_ns
