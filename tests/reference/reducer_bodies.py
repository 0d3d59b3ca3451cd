"""Rank bodies of test_reducer.py: what a reducer launches, and in which buckets."""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddplab.conformance.training_programs import Net, Program, loss_of
from ddplab.reference.data_parallel import DistributedDataParallel
from ddplab.reference.recording.reducer_observer import Observer

from ..scenarios import Wrap, mlp, on_both_classes


class _Launches(Observer):
    def __init__(self) -> None:
        self.ready: list[int] = []
        self.launched: list[int] = []

    def bucket_ready(self, bucket: int) -> None:
        self.ready.append(bucket)

    def bucket_launched(self, bucket: int, future: torch.futures.Future) -> None:
        self.launched.append(bucket)


def watch_launches(rank: int, world_size: int, program: Program, plan: list[list[int]]) -> tuple[list, list]:
    """Order in which buckets became ready, and order in which they were launched."""
    ddp = DistributedDataParallel(Net(program, rank), plan=plan)
    ddp.reducer.observers.append(log := _Launches())
    loss_of(ddp, program, 0, rank, world_size).backward()
    return log.ready, log.launched


def watch_rebuild(rank: int, world_size: int, program: Program, cap_mb: float | None) -> list:
    """Bucket assignment during each step's backward pass."""
    ddp = DistributedDataParallel(Net(program, rank), bucket_cap_mb=cap_mb)
    layouts = []
    for number in range(len(program.steps)):
        loss = loss_of(ddp, program, number, rank, world_size)
        layouts.append(ddp.reducer.buckets.assignment)
        loss.backward()
    return layouts


@on_both_classes
def layouts_by_iteration(wrap: Wrap, _rank: int, options: dict) -> list:
    """Parameter indices by bucket in each iteration, and whether the buckets have been rebuilt."""
    ddp = wrap(mlp((4, 4, 4, 4), torch.float32, 0), **options)
    index = {id(parameter): number for number, parameter in enumerate(ddp.module.parameters())}
    seen = []
    for _ in range(4):
        loss = ddp(torch.ones(1, 4)).sum()
        if wrap is DistributedDataParallel:
            buckets = [list(indices) for indices in ddp.reducer.buckets.assignment]
        else:
            shadows = ddp.reducer._get_zeros_like_grad_buckets()
            buckets = [[index[id(parameter)] for parameter in bucket.parameters()] for bucket in shadows]
        loss.backward()
        seen.append((buckets, ddp._has_rebuilt_buckets))
    return seen


CHANGES = {
    "double": lambda parameter: setattr(parameter, "grad", parameter.grad.mul_(2)),
    "drop": lambda parameter: setattr(parameter, "grad", None),
    "replace": lambda parameter: setattr(parameter, "grad", parameter.grad.clone()),
}


def message_of(step: Callable[[], object]) -> str:
    """The message of the RuntimeError that a step raises; empty: it raises none."""
    try:
        step()
    except RuntimeError as error:
        return str(error)
    return ""


def two_layers(width: int = 1) -> nn.Sequential:
    module = nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    return module


def gradients_changed_by_a_later_hook(rank: int, _world_size: int, change: str, views: bool) -> str:
    """A hook of the first layer changes the last layer's gradient, which waits for its bucket; returns the error."""
    module = two_layers()
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=views)
    first, last = module.parameters()
    first.register_post_accumulate_grad_hook(lambda _ready: CHANGES[change](last))
    return message_of(lambda: ddp(torch.full((1, 1), float(rank + 1))).sum().backward())


def view_replaced_later(rank: int, _world_size: int) -> str:
    """From the fourth iteration on, a hook replaces a view whose bucket was launched; returns the error."""
    module = two_layers()
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=True, bucket_cap_mb=1e-6)
    first, last = module.parameters()
    for _ in range(3):
        ddp(torch.full((1, 1), float(rank + 1))).sum().backward()
    first.register_post_accumulate_grad_hook(lambda _ready: CHANGES["replace"](last))
    return message_of(lambda: ddp(torch.full((1, 1), float(rank + 1))).sum().backward())


def parameter_in_two_wrappers(rank: int, _world_size: int, options: dict) -> tuple[str | None, list, list]:
    """Two modules with one weight, each wrapped: the error, the averages, and those of one wrapper of both."""
    averages = []
    for together in (False, True):
        torch.manual_seed(0)
        a, b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
        b.weight = a.weight
        if together:
            run = DistributedDataParallel(nn.Sequential(a, b), **options)
        else:
            of_a, of_b = (DistributedDataParallel(one, **options) for one in (a, b))
            run = lambda x, of_a=of_a, of_b=of_b: of_b(of_a(x))  # noqa: E731
        if message := message_of(lambda run=run: run(torch.full((1, 2), float(rank + 1))).sum().backward()):
            return message, [], []
        averages.append(a.weight.grad.tolist())
    return None, *averages


def dtype_of_one_gradient_changes(rank: int, _world_size: int) -> str:
    """From the fourth iteration on, autograd accumulates one gradient in float32; returns the error."""
    module = two_layers(2).to(torch.bfloat16)
    ddp = DistributedDataParallel(module)
    x = torch.full((1, 2), float(rank + 1), dtype=torch.bfloat16)
    for iteration in range(4):
        if iteration == 3:
            module[0].weight.grad_dtype = torch.float32
        if message := message_of(lambda: ddp(x).sum().backward()):
            return message
        module.zero_grad()
    return ""


class _SharedGradient(nn.Module):
    """Autograd leaves both parameters one gradient, in one memory, unless `factors` differ."""

    def __init__(self, factors: tuple[int, int]) -> None:
        super().__init__()
        self.rows, self.columns = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3, 2))
        self._factors = factors

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [(self.rows.view(6), self._factors[0]), (self.columns.view(6), self._factors[1])]
        return sum(part if factor == 1 else part * factor for part, factor in parts if factor) * x


def gradients_in_one_memory(rank: int, world_size: int, used: int, options: dict) -> tuple[list, list]:
    """Gradients of four iterations and what they must be; on other ranks than 0, `columns` counts `used` times."""
    x = torch.arange(6.0)
    ddp = DistributedDataParallel(_SharedGradient((1, 1 if rank == 0 else used)), **options)
    found = []
    for step in range(1, 5):
        ddp.zero_grad()
        ddp(step * (rank + 1) * x).sum().backward()
        found.append([parameter.grad.flatten().tolist() for parameter in ddp.parameters()])
    ranks = range(world_size)
    sums = sum(r + 1 for r in ranks), sum((r + 1) * (1 if r == 0 else used) for r in ranks)
    return found, [[(step * total / world_size * x).tolist() for total in sums] for step in range(1, 5)]


@on_both_classes
def clones(wrap: Wrap, _rank: int, views: bool) -> list[int]:
    """Tensors that each of four iterations clones; a gradient is as large as the one before, and takes its memory."""
    layers = [nn.Linear(512, 512, bias=False) for _ in range(4)]
    ddp = wrap(nn.Sequential(*layers), gradient_as_bucket_view=views)
    cloned = []
    for _ in range(4):
        ddp.zero_grad()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            ddp(torch.ones(2, 512)).sum().backward()
        cloned.append(sum(event.name == "aten::clone" for event in profile.events()))
    return cloned


def wrapper_in_a_checkpoint(rank: int, _world_size: int, beside: bool) -> str:
    """The error of a wrapper in a re-entrant checkpoint, `beside` another forward pass of it or alone."""
    ddp = DistributedDataParallel(two_layers())
    x = torch.full((1, 1), float(rank + 1), requires_grad=True)
    through = checkpoint(ddp, x, use_reentrant=True)
    return message_of(lambda: (ddp(through) if beside else through).sum().backward())


def forward_in_a_hook(rank: int, _world_size: int) -> str:
    """The error of a forward pass of the wrapper, with gradients, in a hook while the last layer's bucket is sent."""
    ddp = DistributedDataParallel(two_layers(), bucket_cap_mb=1e-6)
    x = torch.full((1, 1), float(rank + 1))
    next(ddp.parameters()).register_hook(lambda _gradient: torch.enable_grad()(ddp)(x) and None)
    return message_of(lambda: ddp(x).sum().backward())


class _Tiny(nn.Module):
    """A scalar and a parameter without elements, whose bucket is as large as the scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar, self.empty = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scalar * x + self.empty.sum()


def views_of_a_tiny_bucket(rank: int, _world_size: int) -> list[float]:
    """Averages of the scalar, accumulated over three iterations into a view."""
    ddp = DistributedDataParallel(_Tiny(), gradient_as_bucket_view=True)
    seen = []
    for _ in range(3):
        ddp(torch.full((1,), float(rank))).sum().backward()
        seen.append(ddp.module.scalar.grad.item())
    return seen
