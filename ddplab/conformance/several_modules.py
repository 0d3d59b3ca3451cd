"""Modules and groups side by side: two modules in one loss, copies of a module, two process groups."""

import copy
import pickle
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .check_runner import VIEWS, Bench, report
from .class_under_test import NotSupportedError, Subject
from .local_training import FindingError
from .real_models import STEPS, Training, batch, build, difference, local_gradients, mean_square, mlp
from .training_programs import BUFFER_OPTIONS

COPY: dict[str, Callable[[nn.Module], nn.Module]] = {
    "a deep copy": copy.deepcopy,
    "an unpickled copy": lambda module: pickle.loads(pickle.dumps(module)),
}
"""Functions that copy a wrapped module, by the name of the copy."""
CUSTOM = ("__deepcopy__", "__copy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")
"""Methods with which a class determines how it is copied."""
LOCAL = "is trained on its own rank only"


def two_modules(rank: int, world_size: int, subject: Subject, **options: Any) -> str:
    """Train two modules, in turn and in one loss; returns what is wrong."""
    modules, twins = ([build(mlp, seed) for seed in (1, 2)] for _ in range(2))
    wrapped = [subject.wrap(module, bucket_cap_mb=1e-4, **options) for module in modules]

    def loss(chosen: Any, step: int, rank: int) -> Tensor:
        return torch.stack([mean_square(module, step, rank) for module in chosen]).prod()

    problem = ""  # returned at the end, because the other ranks go on
    for step in range(STEPS):
        chosen = (slice(2), slice(1), slice(1, 2))[step % 3]
        for module in modules:
            module.zero_grad()
        loss(wrapped[chosen], step, rank).backward()
        for wrapper, module in zip(wrapped[chosen], modules[chosen], strict=True):
            subject.finish(wrapper, torch.optim.SGD(module.parameters(), lr=0.1))
        local = local_gradients(nn.ModuleList(twins[chosen]), loss, step, range(world_size))
        if not problem and (wrong := difference(nn.ModuleList(modules[chosen]), local, tolerance=subject.tolerance)):
            problem = f"two modules, iteration {step}, rank {rank}: {wrong}"
    return problem


def copied(rank: int, world_size: int, subject: Subject, how: str, *, trained: bool) -> tuple[str, str]:
    """Train a module and a copy of it, in turn and with both backward passes after both forward passes.

    `how` is a key of `COPY`; the module may be trained before it is copied. Returns what is wrong, and why the copy
    is not averaged, although nothing is wrong; each empty if nothing.
    """
    training = Training(subject)
    module, wrapped, twin = training.module, training.wrapped, training.twin

    def backward(replica: nn.Module, loss: Tensor) -> None:
        loss.backward()
        subject.finish(replica, torch.optim.SGD(replica.parameters(), lr=0.1))

    if trained:
        backward(wrapped, mean_square(wrapped, 0, rank))
    try:
        copy_of_wrapped = COPY[how](wrapped)
    except Exception as error:  # noqa: BLE001 - a class may refuse with any exception
        return "", f"is refused with {type(error).__name__}"
    inner = [part for part in copy_of_wrapped.modules() if isinstance(part, nn.Sequential)][-1]
    if any(parameter is other for parameter in module.parameters() for other in inner.parameters()):
        return f"{how} shares the parameters of the original", ""
    problem = shortcoming = ""
    for step in range(1, STEPS + 2):
        wrapped.zero_grad()
        copy_of_wrapped.zero_grad()
        order = [(wrapped, step), (copy_of_wrapped, step + 10)]
        passes = ((replica, mean_square(replica, number, rank)) for replica, number in order)  # when asked for
        for replica, loss in passes if step % 2 else [*passes][::-1]:
            backward(replica, loss)
        for name, replica, number in (("the original", module, step), (how, inner, step + 10)):
            twin.load_state_dict(replica.state_dict())
            local = local_gradients(twin, mean_square, number, range(world_size))
            wrong = difference(replica, local, tolerance=subject.tolerance)
            if wrong and replica is inner and not difference(replica, [local[rank]]):
                shortcoming = LOCAL
            elif wrong:
                problem = problem or f"{name}, after {how} was made: iteration {step}, rank {rank}: {wrong}"
    return problem, shortcoming


def check_modules(bench: Bench) -> str:
    """Two modules train side by side, and an original beside its copy; copies may stay local or be refused.

    A copy that stays local is a fault if the class determines how it is copied. Returns how copies behave that are
    not averaged; empty if all are.
    """
    for options in bench.variants({}, VIEWS):
        bench.try_body(two_modules, **options)
    determines = not bench.offer.defines.isdisjoint(CUSTOM)
    notes = []
    for how in COPY:
        for trained in (False, True):
            outcomes = bench.run(partial(copied, trained=trained), bench.subject, how)
            report([problem for problem, _ in outcomes])
            shortcoming = next((noted for _, noted in outcomes if noted), "")
            if shortcoming == LOCAL and determines:
                raise FindingError(f"{how} {shortcoming}, although the class determines how it is copied")
            if shortcoming and f"{how} {shortcoming}" not in notes:
                notes.append(f"{how}{' of a trained module' * trained} {shortcoming}")
    return "; ".join(notes)


# Process groups


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
    """Train in two groups at the same time, the first rank alone and the others together; then on all ranks.

    Each group uses the heads in `used`. None: both use both.
    """
    groups = [[0], list(range(1, world_size))]
    handles = [group_of(members) for members in groups]  # every rank takes part in making each group
    number = min(rank, 1)
    members = groups[number]

    def run(module: nn.Module, step: int, rank: int) -> Tensor:
        return module(batch(step, rank), used[number] if used else (0, 1), rank).square().mean()  # type: ignore[no-any-return]

    training = Training(subject, _Grouped, members, process_group=handles[number], **options)
    if number:  # a wrapper in one group is no concern of the other
        Training(subject, mlp, members, process_group=handles[number])
    if problem := training.train(run):
        return f"group of ranks {members}, {problem}"
    first = members[0]
    want = 100 * first + (STEPS - 1) * (first + 1) + rank + 1
    got = training.module.get_buffer("sum").item()
    if set(BUFFER_OPTIONS) & subject.options and got != want:
        return f"group of ranks {members}, rank {rank}: the buffer is {got:g}, expected {want}, with rank {first}'s"
    return Training(subject).train(steps=1)


def check_groups(bench: Bench) -> None:
    """Two groups train side by side, and the buffers of each are those of its first rank."""
    bench.needs("process_group")
    for options in bench.variants({}, VIEWS, "static_graph"):
        if refusal := bench.averages_or_refuses("group", in_groups, options, None):
            raise NotSupportedError(f"it refuses one: {refusal}")
    if "find_unused_parameters" in bench.offer.options:
        bench.try_body(in_groups, {"find_unused_parameters": True}, [(0,), (1,)])
