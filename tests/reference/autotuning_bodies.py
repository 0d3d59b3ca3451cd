"""Rank bodies of test_autotuning.py: training whose buckets are tuned, by tuners that give prepared answers."""

import copy
import gc
import logging
import pickle
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ddplab.conformance.training_programs import Net, Program, loss_of
from reference.autotuning import Autotune, TunedBuckets
from reference.comm_hooks.allreduce import allreduce
from reference.data_parallel import DistributedDataParallel
from reference.trace import Trace

from ..scenarios import gradients, mlp

Layout = tuple[tuple[int, ...], ...]


@dataclass
class Answers:
    """A tuner that returns, or raises, one prepared answer; a list of buckets becomes `TunedBuckets`."""

    answer: Any
    traces: list[Trace] = field(default_factory=list)

    def __call__(self, trace: Trace, _ddp: DistributedDataParallel) -> Any:
        self.traces.append(trace)
        if isinstance(self.answer, Exception):
            raise self.answer
        return TunedBuckets(self.answer, 50, 70) if isinstance(self.answer, list) else self.answer


class Trained(NamedTuple):
    """What a rank saw: by iteration the gradients and the buckets; the tuner's traces, logging data and log lines."""

    gradients: list[list[Tensor | None]]
    layouts: list[Layout]
    traces: list[Trace]
    logged: dict[str, Any]
    lines: list[str]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def train(
    rank: int, world_size: int, program: Program, autotune: Autotune | None, *, local_passes: int = 0, **options: Any
) -> Trained:
    """Train a program's model step by step; rank r runs r times `local_passes` more passes, under `no_sync`."""
    ddp = DistributedDataParallel(Net(program, rank), autotune=autotune, **options)
    logger, seen = logging.getLogger("reference.autotuning"), _Lines()
    logger.addHandler(seen)
    logger.setLevel(logging.INFO)
    every, layouts = [], []
    for number in range(len(program.steps)):
        ddp.zero_grad()
        for synchronized in [*[False] * (rank * local_passes), True]:
            with nullcontext() if synchronized else ddp.no_sync():
                loss = loss_of(ddp, program, number, rank, world_size)
                layouts += [ddp.reducer.buckets.assignment] * synchronized
                loss.backward()
        every.append([None if p.grad is None else p.grad.to_dense().clone() for p in ddp.parameters()])
    logger.removeHandler(seen)
    traces = [] if autotune is None else ddp.autotune.tuner.traces
    return Trained(every, layouts, traces, dict(ddp.log.autotune), seen.lines)


def what_remains(_rank: int, _world_size: int, iterations: int) -> tuple[list[bool], list[bool], bool]:
    """Whether anything of the tuning is left: while it records, after it, and after a module that never tuned."""

    def left(ddp: DistributedDataParallel) -> list[bool]:
        return [
            bool(ddp._forward_pre_hooks or ddp._forward_hooks),
            bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks),
            ddp.reducer.observers != [ddp.log],
            ddp.reducer.rebuild != ddp.reducer.buckets.rebuild_if_due,
        ]

    ddp = DistributedDataParallel(mlp((2, 3, 1), torch.float32, 0), autotune=Autotune(Answers(None), iterations))
    for _ in range(2):
        ddp(torch.ones(1, 2)).sum().backward()
    during = left(ddp)
    for _ in range(iterations + 1):
        ddp(torch.ones(1, 2)).sum().backward()
    after = left(ddp)
    gc.collect()
    gc.disable()
    unfinished = DistributedDataParallel(ddp.module, autotune=Autotune(Answers(None), iterations))
    for _ in range(2):
        unfinished(torch.ones(1, 2)).sum().backward()
    alive = weakref.ref(unfinished)
    del unfinished
    is_left = alive() is not None or bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)
    gc.enable()
    return during, after, is_left


def copies_made_while_recording(rank: int, _world_size: int) -> list[tuple[bool, Layout, list[float]]]:
    """Of the module, a deep copy and a pickle: no hooks at first (copies), buckets and gradients at the end."""
    ddp = DistributedDataParallel(nn.Linear(2, 1), autotune=Autotune(Answers([[1], [0]]), 1))
    for _ in range(2):
        ddp(torch.ones(1, 2)).sum().backward()
    models = [ddp, copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))]
    found = []
    for model in models:
        free = not model._forward_pre_hooks and not model._forward_hooks
        for _ in range(5):
            model.zero_grad()
            model(torch.full((1, 2), float(rank))).sum().backward()
        found.append((free, model.reducer.buckets.assignment, model.module.weight.grad.flatten().tolist()))
    return found


def train_compiled(rank: int, _world_size: int) -> tuple[dict[str, Any], Layout, list[float]]:
    """Logging data, buckets and averages of a data-parallel module that is compiled as a whole."""
    ddp = DistributedDataParallel(nn.Linear(2, 1), autotune=Autotune(Answers([[1], [0]]), 2))
    compiled = torch.compile(ddp, backend="eager")
    for _ in range(6):
        ddp.zero_grad()
        compiled(torch.full((1, 2), float(rank))).sum().backward()
    return ddp.log.autotune, ddp.reducer.buckets.assignment, ddp.module.weight.grad.flatten().tolist()


def freeze_when_the_recording_starts(rank: int, _world_size: int) -> tuple[dict[str, Any], Layout, list[float]]:
    """Logging data, buckets and averages; all parameters are frozen in the second forward pass, and not later."""
    ddp = DistributedDataParallel(nn.Linear(2, 1), autotune=Autotune(Answers([[1], [0]]), 2))
    for number in range(8):
        ddp.zero_grad()
        ddp.module.requires_grad_(number != 1)
        loss = ddp(torch.full((1, 2), float(rank))).sum()
        if number != 1:
            loss.backward()
    return ddp.log.autotune, ddp.reducer.buckets.assignment, ddp.module.weight.grad.flatten().tolist()


def tune_again_in_a_new_group(rank: int, _world_size: int) -> tuple[int, list[Layout], list[list[float]]]:
    """Change the process group while recording and after tuning: calls of rank 0's tuner, buckets, gradients."""
    tuner = Answers([[1], [0]])
    ddp = DistributedDataParallel(nn.Linear(2, 1), autotune=Autotune(tuner, 1))
    layouts, averages = [], []
    for iterations in (2, 5, 5):
        for _ in range(iterations):
            ddp.zero_grad()
            ddp(torch.full((1, 2), float(rank))).sum().backward()
        layouts.append(ddp.reducer.buckets.assignment)
        averages.append(ddp.module.weight.grad.flatten().tolist())
        ddp._update_process_group(dist.group.WORLD)
    return len(tuner.traces), layouts, averages


class Words(nn.Module):
    """An embedding with sparse gradients, and layers of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, sparse=True)
        self.narrow, self.wide = nn.Linear(4, 2), nn.Linear(2, 1).double()

    def forward(self, words: Tensor) -> Tensor:
        return self.wide(self.narrow(self.embedding(words)).double())


def train_words(rank: int, _world_size: int, answer: Any) -> tuple[list[list[Tensor]], Layout, str]:
    """Gradients by iteration, buckets at the end, and the tuner's error."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Words(), autotune=answer and Autotune(Answers(answer), 1))
    every = []
    for _ in range(6):
        ddp.zero_grad()
        ddp(torch.tensor([rank, 2])).sum().backward()
        every.append([gradient.to_dense() for gradient in gradients(ddp)])
    return every, ddp.reducer.buckets.assignment, ddp.log.autotune.get("autotune_error", "")


def refused(rank: int, _world_size: int, options: dict[str, Any], only_rank: int | None) -> str:
    """The error of a module that tunes, on all ranks or only one, with other options."""
    autotune = Autotune(Answers(None)) if only_rank in (None, rank) else None
    module = mlp((2, 3, 1), torch.float32, 0)
    if options.get("delay"):
        named = dict(module.named_parameters())
        options = {"delay_all_reduce_named_params": [*named.items()][:1], "param_to_hook_all_reduce": named["0.bias"]}
    try:
        DistributedDataParallel(module, **{"autotune": autotune, **options})
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def recorded(rank: int, _world_size: int, iterations: int) -> tuple[Trace | None, dict[str, Any]]:
    """The tuner's trace of a training loop with an optimiser, and the logging data under torch's names."""
    tuner = Answers([[1, 0]])
    ddp = DistributedDataParallel(nn.Linear(2, 1), bucket_cap_mb=0, autotune=Autotune(tuner, iterations))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(iterations + 4):
        optimizer.zero_grad()
        ddp(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return (tuner.traces[0] if rank == 0 else None), ddp._get_ddp_logging_data()


def train_with_hook(
    rank: int, world_size: int, program: Program, autotune: Autotune | None
) -> list[list[Tensor | None]]:
    """Gradients by step, averaged by a comm hook."""
    ddp = DistributedDataParallel(Net(program, rank), autotune=autotune)
    ddp.register_comm_hook(None, allreduce)
    every = []
    for number in range(len(program.steps)):
        ddp.zero_grad()
        loss_of(ddp, program, number, rank, world_size).backward()
        every.append([None if p.grad is None else p.grad.clone() for p in ddp.parameters()])
    return every


class Tuned(DistributedDataParallel):
    """Tunes every module that can be tuned: after one recorded iteration, each bucket is cut in two."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        never_rebuilt = options.get("find_unused_parameters") and not options.get("static_graph")
        tunes = not (never_rebuilt or options.get("plan") or options.get("delay_all_reduce_named_params"))
        super().__init__(module, autotune=Autotune(halved_buckets, iterations=1) if tunes else None, **options)


def halved_buckets(_trace: Trace, ddp: DistributedDataParallel) -> TunedBuckets:
    """The buckets in force, each cut in two."""
    halves = [
        half
        for indices in ddp.reducer.buckets.assignment
        for half in (indices[: len(indices) // 2], indices[len(indices) // 2 :])
    ]
    return TunedBuckets([half for half in halves if half], 1, 2)
