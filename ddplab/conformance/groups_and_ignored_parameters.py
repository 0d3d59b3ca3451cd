"""Process groups that train side by side, and parameters that a module asks to ignore."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .check_runner import VIEWS, Bench, report
from .class_under_test import NotSupportedError, Subject
from .real_models import batch, difference, local_gradients, mlp, square, train
from .training_programs import BUFFER_OPTIONS

IGNORE = "_set_params_and_buffers_to_ignore_for_model"


class _Grouped(nn.Module):
    """Two heads, of which forward may use one, and a buffer, different on each rank, to which each pass adds."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))
        self.register_buffer("sum", torch.tensor(100.0 * rank))

    def forward(self, x: Tensor, used: Sequence[int], rank: int) -> Tensor:
        if self.training:
            self.get_buffer("sum").add_(rank + 1)
        return torch.stack([self.heads[index](x) for index in used]).sum(dim=0)


@cache
def _group_of(members: tuple[int, ...], _default: dist.ProcessGroup) -> dist.ProcessGroup:
    return dist.new_group(list(members))  # type: ignore[no-any-return]


def group_of(members: Sequence[int]) -> dist.ProcessGroup:
    """Return a group of some ranks, which is made once; call on every rank."""
    default = dist.group.WORLD
    assert default is not None  # the pool's
    return _group_of(tuple(members), default)


def in_groups(
    rank: int, world_size: int, subject: Subject, options: dict[str, Any], used: Sequence[Sequence[int]] | None
) -> str:
    """Train in two groups at the same time, the first rank alone and the others together.

    Args:
        rank: The rank.
        world_size: Number of ranks.
        subject: The class under test.
        options: Arguments for the class.
        used: The heads that each group uses. None: both.
    """
    groups = [[0], list(range(1, world_size))]
    handles = [group_of(members) for members in groups]  # every rank takes part in making each group
    number, steps = min(rank, 1), 3
    members = groups[number]
    wrapped_modules: list[nn.Module] = []

    def make(seed: int) -> nn.Module:
        wrapped_modules.append(_Grouped(seed))
        return wrapped_modules[-1]

    def loss(module: nn.Module, step: int, rank: int) -> Tensor:
        return module(batch(step, rank), used[number] if used else (0, 1), rank).square().mean()  # type: ignore[no-any-return]

    if problem := train(subject, make, loss, members, steps, process_group=handles[number], **options):
        return f"group of ranks {members}, {problem}"
    first = members[0]
    expected = 100 * first + (steps - 1) * (first + 1) + rank + 1
    got = wrapped_modules[0].get_buffer("sum").item()
    if set(BUFFER_OPTIONS) & subject.options and got != expected:
        return (
            f"group of ranks {members}, rank {rank}: the buffer is {got:g}, expected {expected}, with rank {first}'s"
        )
    return ""


class _WithIgnored(nn.Module):
    """A perceptron beside a layer and a buffer that are to be ignored."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.averaged, self.ignored = mlp(seed), nn.Linear(6, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.averaged(x) + self.ignored(x)  # type: ignore[no-any-return]


def ignored_parameters(rank: int, world_size: int, subject: Subject) -> str:
    """Train with parameters and a buffer that the module asks to ignore: they stay each rank's own."""
    module, names = _WithIgnored(seed=rank), ["ignored.weight", "ignored.bias", "count"]
    own = {name: one.detach().clone() for name, one in module.ignored.named_parameters()}
    getattr(subject.make, IGNORE)(module, names)
    wrapped = subject.wrap(module, bucket_cap_mb=1e-4)
    for name, value in own.items():
        if not torch.equal(module.ignored.get_parameter(name), value):
            return f"rank {rank}: construction overwrote the ignored parameter {name!r}"
    optimizer = torch.optim.SGD(module.averaged.parameters(), lr=0.1)
    for step in range(3):
        module.get_buffer("count").fill_(10 * step + rank)
        module.zero_grad()
        square(wrapped, step, rank).backward()
        subject.finish(wrapped, optimizer)
        twin = _WithIgnored(seed=0)
        twin.load_state_dict(module.state_dict())
        (alone,) = local_gradients(twin, square, step, [rank])
        for name in ("ignored.weight", "ignored.bias"):
            if not torch.equal(module.get_parameter(name).grad, alone[name]):  # type: ignore[arg-type]
                return f"iteration {step}, rank {rank}: the ignored parameter {name!r} has not its own gradient"
        if module.get_buffer("count").item() != 10 * step + rank:
            return f"iteration {step}, rank {rank}: the ignored buffer was overwritten"
        everyones: list[Any] = [None] * world_size
        dist.all_gather_object(everyones, alone)
        for one in everyones:
            for name in ("ignored.weight", "ignored.bias"):
                one[name] = alone[name]
        if problem := difference(module, everyones):
            return f"iteration {step}, rank {rank}: {problem}"
        optimizer.step()
    return ""


def check_group(bench: Bench) -> None:
    """Two groups train side by side, and the buffers of each are those of its first rank."""
    bench.needs("process_group")
    some = [(0,), (1,)]
    for options in bench.variants({}, VIEWS, "static_graph"):
        report(bench.run(in_groups, bench.subject, options, None))
    if "find_unused_parameters" in bench.subject.options:
        report(bench.run(in_groups, bench.subject, {"find_unused_parameters": True}, some))


def check_ignored(bench: Bench) -> None:
    """Parameters and buffers that the module asks to ignore stay each rank's own."""
    if not hasattr(bench.subject.make, IGNORE):
        raise NotSupportedError(f"it has no {IGNORE}")
    report(bench.run(ignored_parameters, bench.subject))
