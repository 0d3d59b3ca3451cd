"""Training runs on real ranks: the bodies that are recorded and measured."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from reference import models
from reference.data_parallel import DistributedDataParallel
from reference.launch import report_progress
from reference.parameters import size_bytes, trainable_parameters
from reference.recorder import record
from reference.trace import Trace

from ..schedule.comm_hooks import NO_HOOK
from .hook_costs import real_hook
from .report import Measurement, SpeedCheck
from .timing import clock_ns, time_ns

WARM_UP = 2
RECORDED_ITERATIONS = 8
MEASURED_ITERATIONS = 3
"""Each time that a configuration has its turn, after those that are not counted."""
REFERENCES = 2
"""Between two turns: computation, and then an all-reduce of all gradients."""
WARM_UP_OF_HOOKS = 4
"""PowerSGD compresses from the third iteration on, and begins with its last Q from the fourth."""


class TargetRun(NamedTuple):
    """What a target run is told: arguments of `DistributedDataParallel`, and a comm hook by its name."""

    arguments: dict[str, Any]
    hook: str = "none"


class Trainer:
    """A model, its batch and its optimiser on this rank."""

    def __init__(self, model: str, rank: int) -> None:
        torch.manual_seed(rank)  # ranks have batches of their own; data parallelism makes their parameters equal
        self.module, self._loss_fn = models.build(model)
        self.batch: int | None = getattr(self._loss_fn, "batch", None)
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3)

    def step(self, module: nn.Module) -> None:
        """One iteration; `module` is the model, or what wraps it."""
        self._optimizer.zero_grad()
        self._loss_fn(module).backward()
        self._optimizer.step()


def record_computation(rank: int, _world_size: int, model: str, iterations: int = RECORDED_ITERATIONS) -> Trace:
    """All ranks compute at the same time, as they will in training, but do not communicate."""
    trainer = Trainer(model, rank)
    for _ in range(WARM_UP):
        trainer.step(trainer.module)
    with record(trainer.module, model=model, batch=trainer.batch, process_group=dist.group.WORLD) as recording:
        dist.barrier()  # inside: opening the recording takes one rank longer than another
        for _ in range(iterations):
            trainer.step(trainer.module)
    return recording.trace


def measure_configurations(
    rank: int, _world_size: int, model: str, configurations: Sequence[TargetRun], word: str
) -> list[Measurement]:
    """Train under each configuration in turn, and time the reference in between.

    Args:
        rank: This rank.
        model: As for `--model`.
        configurations: What to train under.
        word: What progress is called.
    """
    trainer = Trainer(model, rank)
    measured = []
    all_gradients = torch.ones(sum(map(size_bytes, trainable_parameters(trainer.module).values())) // 4)
    _time_references(trainer, all_gradients)  # the first touch of every gradient does not count
    before = _time_references(trainer, all_gradients)
    for done, told in enumerate(configurations):
        if rank == 0:
            report_progress(word, done, len(configurations))
        times_ns = _train(trainer, told)
        after = _time_references(trainer, all_gradients)
        measured.append(Measurement(times_ns, _median([*before, *after])))
        before = after
    return measured


def _train(trainer: Trainer, told: TargetRun) -> tuple[int, ...]:
    ddp = DistributedDataParallel(trainer.module, **told.arguments)
    warm_up = 1 if "plan" in told.arguments else 2  # the rebuild comes with the second iteration
    try:
        if told.hook != NO_HOOK.name:
            hook, make_state = real_hook(told.hook)
            ddp.register_comm_hook(make_state(), hook)
            warm_up = WARM_UP_OF_HOOKS
        for _ in range(warm_up):
            trainer.step(ddp)
        dist.barrier()
        ends_ns = [clock_ns()]
        for _ in range(MEASURED_ITERATIONS):
            trainer.step(ddp)
            ends_ns.append(clock_ns())
        # From one slowest rank's end to the next: a rank that is early waits for the others in its next iteration,
        # so the sum of the longest times would be longer than the training. The ranks' machine has one clock.
        return tuple(end - start for start, end in pairwise(_slowest_ranks(ends_ns)))
    finally:
        ddp.reducer.detach()


def _median(references: Sequence[SpeedCheck]) -> SpeedCheck:
    return SpeedCheck(
        round(median(reference.compute_ns for reference in references)),
        round(median(reference.all_reduce_ns for reference in references)),
    )


def _time_references(trainer: Trainer, all_gradients: Tensor) -> list[SpeedCheck]:
    times_ns = []
    for _ in range(REFERENCES):
        for action, *arguments in ((trainer.step, trainer.module), (dist.all_reduce, all_gradients)):
            dist.barrier()
            times_ns.append(time_ns(action, *arguments))
    slowest = _slowest_ranks(times_ns)
    return [SpeedCheck(*slowest[place : place + 2]) for place in range(0, len(slowest), 2)]


def _slowest_ranks(times_ns: list[int]) -> tuple[int, ...]:
    slowest = torch.tensor(times_ns)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return tuple(int(ns) for ns in slowest)
