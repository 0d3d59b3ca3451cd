"""Process groups that train side by side, and parameters that a module asks to ignore."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .check_runner import VIEWS, Bench
from .class_under_test import NotSupportedError, Subject
from .real_models import STEPS, Training, batch, build, difference, mean_square, mlp
from .training_programs import BUFFER_OPTIONS

IGNORE = "_set_params_and_buffers_to_ignore_for_model"


class _Grouped(nn.Module):
    """Two heads, of which forward may use one, and a buffer, different on each rank, to which each pass adds."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))
        self.register_buffer("sum", torch.tensor(100.0 * dist.get_rank()))

    def forward(self, x: Tensor, used: Sequence[int], rank: int) -> Tensor:
        if self.training:
            self.get_buffer("sum").add_(rank + 1)
        return torch.stack([self.heads[index](x) for index in used]).sum(dim=0)


@cache
def _group_of(members: tuple[int, ...], _default: dist.ProcessGroup | None) -> dist.ProcessGroup:
    return dist.new_group(list(members))  # type: ignore[no-any-return]


def group_of(members: Sequence[int]) -> dist.ProcessGroup:
    """Return a group of some ranks of the pool, which is made once; call on every rank."""
    return _group_of(tuple(members), dist.group.WORLD)


def in_groups(
    rank: int, world_size: int, subject: Subject, options: dict[str, Any], used: Sequence[Sequence[int]] | None
) -> str:
    """Train in two groups at the same time, the first rank alone and the others together.

    Each group uses the heads in `used`. None: both use both.
    """
    groups = [[0], list(range(1, world_size))]
    handles = [group_of(members) for members in groups]  # every rank takes part in making each group
    number = min(rank, 1)
    members = groups[number]

    def run(module: nn.Module, step: int, rank: int) -> Tensor:
        return module(batch(step, rank), used[number] if used else (0, 1), rank).square().mean()  # type: ignore[no-any-return]

    training = Training(subject, _Grouped, members, process_group=handles[number], **options)
    if problem := training.train(run):
        return f"group of ranks {members}, {problem}"
    first = members[0]
    expected = 100 * first + (STEPS - 1) * (first + 1) + rank + 1
    got = training.module.get_buffer("sum").item()
    if set(BUFFER_OPTIONS) & subject.options and got != expected:
        return (
            f"group of ranks {members}, rank {rank}: the buffer is {got:g}, expected {expected}, with rank {first}'s"
        )
    return ""


class _WithIgnored(nn.Module):
    """A perceptron beside a layer and a buffer that are to be ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.averaged, self.ignored = mlp(), nn.Linear(6, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.averaged(x) + self.ignored(x)  # type: ignore[no-any-return]


def ignored_parameters(rank: int, world_size: int, subject: Subject) -> str:
    """Train with parameters and a buffer that the module asks to ignore: they stay each rank's own."""
    names = ("ignored.weight", "ignored.bias")

    def make() -> nn.Module:
        module = _WithIgnored()
        getattr(subject.make, IGNORE)(module, [*names, "count"])
        return module

    training = Training(subject, make)
    module, own = training.module, build(_WithIgnored, rank)
    for name in names:
        if not torch.equal(module.get_parameter(name), own.get_parameter(name)):
            return f"rank {rank}: construction overwrote the ignored parameter {name!r}"
    for step in range(STEPS):
        module.get_buffer("count").fill_(10 * step + rank)
        training.backward(mean_square, step)
        (alone,) = training.local(mean_square, step, [rank])
        for name in names:
            if not torch.equal(module.get_parameter(name).grad, alone[name]):  # type: ignore[arg-type]
                return f"iteration {step}, rank {rank}: the ignored parameter {name!r} has not its own gradient"
        if module.get_buffer("count").item() != 10 * step + rank:
            return f"iteration {step}, rank {rank}: the ignored buffer was overwritten"
        everyones: list[Any] = [None] * world_size
        dist.all_gather_object(everyones, alone)
        if problem := difference(module, [one | {name: alone[name] for name in names} for one in everyones]):
            return f"iteration {step}, rank {rank}: {problem}"
        training.optimizer.step()
    return ""


def check_group(bench: Bench) -> None:
    """Two groups train side by side, and the buffers of each are those of its first rank."""
    bench.needs("process_group")
    for options in bench.variants({}, VIEWS, "static_graph"):
        bench.try_body(in_groups, options, None)
    if "find_unused_parameters" in bench.subject.options:
        bench.try_body(in_groups, {"find_unused_parameters": True}, [(0,), (1,)])


def check_ignored(bench: Bench) -> None:
    """Parameters and buffers that the module asks to ignore stay each rank's own."""
    if not hasattr(bench.subject.make, IGNORE):
        raise NotSupportedError(f"it has no {IGNORE}")
    bench.try_body(ignored_parameters)
