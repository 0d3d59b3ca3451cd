"""Options and habits of torch's class: groups, ignored parameters, nested outputs, checkpoints and others.

Each body trains a small module on every rank and compares its gradients with the average of those that the ranks
have alone. It returns what is wrong, and an empty text if nothing is.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import bucket_layouts, rank_bodies
from .check_runner import Bench, report
from .class_under_test import NotSupportedError, Subject
from .local_training import describe_difference
from .rank_bodies import batch, outside
from .training_programs import Program, Step, Weight

Loss = Callable[[nn.Module, int, int], Tensor]
"""Runs forward for a step and the batch of a rank; returns the loss."""
PRECISIONS = ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32), (torch.float32, torch.float16))
"""Dtypes of computation and of all-reduces."""
IGNORE = "_set_params_and_buffers_to_ignore_for_model"


def local_gradients(twin: nn.Module, loss: Loss, step: int, ranks: Sequence[int]) -> list[dict[str, Tensor | None]]:
    """Return the gradients that each of these ranks has alone."""
    found = []
    for rank in ranks:
        twin.zero_grad()
        loss(twin, step, rank).backward()
        found.append(
            {name: None if (grad := one.grad) is None else grad.to_dense() for name, one in twin.named_parameters()}
        )
    return found


def difference(module: nn.Module, local: Sequence[Mapping[str, Tensor | None]], ranks: int | None = None) -> str:
    """Say which gradient of a module is not the average of these; empty if all are.

    Args:
        module: The module after a backward pass.
        local: The gradients of each rank; None counts as zero, and stays None if all ranks have None.
        ranks: The divisor. None: the number of ranks in `local`.
    """
    for name, parameter in module.named_parameters():
        parts = [one[name] for one in local]
        if all(part is None for part in parts):
            if parameter.grad is not None:
                return f"gradient of {name!r}: got a tensor, expected None, because no rank has one"
            continue
        stacked = torch.stack([torch.zeros_like(parameter) if one is None else one for one in parts]).double()
        if problem := outside(parameter.grad, stacked * (len(parts) / (ranks or len(parts))), parameter.dtype):
            return f"gradient of {name!r}: {problem}"
    return ""


def train(
    subject: Subject, make: Callable[[int], nn.Module], loss: Loss, ranks: Sequence[int], steps: int, **options: Any
) -> str:
    """Train on these ranks and compare each average; call on each of them.

    Args:
        subject: The class under test.
        make: Makes the module of a rank.
        loss: See `Loss`.
        ranks: The ranks that train together; they start from the first one's parameters.
        steps: Number of steps.
        options: Arguments for the class.
    """
    rank = dist.get_rank()
    module, twin = make(rank), make(ranks[0])
    wrapped = subject.wrap(module, **{"bucket_cap_mb": 1e-4} | options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    problem = ""  # returned at the end, because the other ranks go on
    for step in range(steps):
        local = local_gradients(twin, loss, step, ranks)
        module.zero_grad()
        loss(wrapped, step, rank).backward()
        subject.finish(wrapped, optimizer)
        if not problem and (wrong := difference(module, local)):
            problem = f"iteration {step}, rank {rank}: {wrong}"
        optimizer.step()
        twin.load_state_dict(module.state_dict())
    return problem


def _mlp(seed: int) -> nn.Module:
    return rank_bodies.build("multi-layer perceptron", seed)


def _square(module: nn.Module, step: int, rank: int) -> Tensor:
    return module(batch(step, rank)).square().mean()  # type: ignore[no-any-return]


# A group of some ranks


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
    if {"broadcast_buffers", "forward_sync_buffers"} & subject.options and got != expected:
        return (
            f"group of ranks {members}, rank {rank}: the buffer is {got:g}, expected {expected}, with rank {first}'s"
        )
    return ""


# Ignored parameters


class _WithIgnored(nn.Module):
    """A perceptron beside a layer and a buffer that are to be ignored."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.averaged, self.ignored = _mlp(seed), nn.Linear(6, 3)
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
        _square(wrapped, step, rank).backward()
        subject.finish(wrapped, optimizer)
        twin = _WithIgnored(seed=0)
        twin.load_state_dict(module.state_dict())
        (alone,) = local_gradients(twin, _square, step, [rank])
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


# Nested outputs


@dataclass
class _Pair:
    left: Tensor
    right: Tensor


class _Heads(nn.Module):
    """Five heads, whose outputs are in a dict, a list and a dataclass; the last head is never used."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(5))

    def forward(self, x: Tensor) -> dict[str, Any]:
        a, b, c, d = (head(x) for head in list(self.heads)[:4])
        return {"first": a, "others": [b, _Pair(c, d)]}


def _of_heads(module: nn.Module, step: int, rank: int) -> Tensor:
    """Change an output in place, and leave one out."""
    output = module(batch(step, rank))
    used = output["others"][0] if step % 2 else output["first"]
    used.mul_(2)
    pair = output["others"][1]
    return (used + pair.left * pair.right).square().mean()  # type: ignore[no-any-return]


def nested_outputs(_rank: int, world_size: int, subject: Subject, options: dict[str, Any]) -> str:
    """Search nested outputs for unused parameters; outputs that the loss ignores leave no gradient."""
    return train(subject, _Heads, _of_heads, range(world_size), 4, find_unused_parameters=True, **options)


# Checkpoints


class _Checkpointed(nn.Module):
    """A layer that two re-entrant checkpoints share."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shared, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True).tanh()
        return self.head(x)  # type: ignore[no-any-return]


def checkpoints(_rank: int, world_size: int, subject: Subject) -> str:
    """Train with re-entrant checkpoints that share a layer."""

    def loss(module: nn.Module, step: int, rank: int) -> Tensor:
        return module(batch(step, rank).requires_grad_()).square().mean()  # type: ignore[no-any-return]

    return train(subject, _Checkpointed, loss, range(world_size), 3, static_graph=True)


# Forward and backward passes in other numbers


class _Scaled(nn.Module):
    """A layer whose output is multiplied by a buffer, which autograd saves."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(6, 3)
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.get_buffer("scale")  # type: ignore[no-any-return]


def repeated_forward(_rank: int, world_size: int, subject: Subject) -> str:
    """Train with two forward passes before each backward pass."""

    def loss(module: nn.Module, step: int, rank: int) -> Tensor:
        first, second = (module(batch(step + 10 * number, rank)) for number in range(2))
        return (first * second).square().mean()  # type: ignore[no-any-return]

    return train(subject, _Scaled, loss, range(world_size), 3)


def nested_no_sync(rank: int, world_size: int, subject: Subject) -> str:
    """Accumulate under nested `no_sync`, of which one is left by an exception; then average."""
    module = _mlp(seed=0)
    wrapped = subject.wrap(module, bucket_cap_mb=1e-4)
    with suppress(ArithmeticError), subject.no_sync(wrapped):
        raise ArithmeticError

    def loss(module: nn.Module, step: int, rank: int) -> Tensor:
        parts = [_square(module, step + 10 * number, rank) for number in range(3)]
        return torch.stack(parts).sum()

    for step in range(3):
        module.zero_grad()
        with subject.no_sync(wrapped):
            with subject.no_sync(wrapped):
                _square(wrapped, step, rank).backward()
            _square(wrapped, step + 10, rank).backward()
        before = [one.grad.clone() for one in module.parameters() if one.grad is not None]
        twin = _mlp(seed=0)
        (_square(twin, step, rank) + _square(twin, step + 10, rank)).backward()
        alone = [one.grad for one in twin.parameters() if one.grad is not None]
        if not all(map(torch.allclose, before, alone)):
            return f"iteration {step}, rank {rank}: after an inner no_sync, the outer one averaged"
        _square(wrapped, step + 20, rank).backward()
        subject.finish(wrapped, torch.optim.SGD(module.parameters(), lr=0.1))
        if problem := difference(module, local_gradients(twin, loss, step, range(world_size))):
            return f"iteration {step}, rank {rank}: {problem}"
    return ""


# Skipped all-reduces


EVERY_OTHER = (Weight((2, 3)), Weight((4,)), Weight((5,)), Weight((3, 2)))


def skipping_program(world_size: int, cap_mb: float) -> Program:
    """Return a program in which each step leaves other weights out, the same ones on all ranks."""
    used = ((0, 2), (1, 2, 3), (3,), (0, 1, 2), (0,))
    steps = tuple(Step("train", (one,) * world_size, (2,) * world_size) for one in used)
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": cap_mb}
    return Program(EVERY_OTHER, steps, options)


class _Chosen(nn.Module):
    """Weights of which forward uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(2 + index)) for index in range(4))

    def forward(self, used: Sequence[int]) -> list[Tensor]:
        return [self.weights[index].sum() for index in used]


def skipped_for_hooks(_rank: int, world_size: int, subject: Subject) -> str:
    """Train with a comm hook, which gets the buckets that are not skipped."""
    module = _Chosen()
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    wrapped: Any = subject.wrap(module, bucket_cap_mb=1e-6, **options)
    seen: list[tuple[int, bool]] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - torch's class accepts no other
        # annotation than its own bucket's
        state.append((bucket.buffer().numel(), bucket.is_last()))
        future = dist.all_reduce(bucket.buffer().div_(world_size), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    wrapped.register_comm_hook(seen, hook)
    for step, used in enumerate(((0, 2), (1, 2, 3), (3,), (0, 1, 2), (0,))):
        seen.clear()
        module.zero_grad()
        torch.stack(wrapped(used)).sum().backward()
        expected = sorted(2 + index for index in used)
        if sorted(size for size, _ in seen) != expected:
            return (
                f"iteration {step}: the comm hook got buckets of {seen} elements, expected {expected} in some order"
            )
        if any(is_last for _, is_last in seen[:-1]):  # torch names none if the last bucket of all is skipped
            return f"iteration {step}: a bucket was called the last, but others followed: {seen}"
    return ""


# Mixed precision


def in_mixed_precision(rank: int, world_size: int, subject: Subject, low: torch.dtype, reduce: torch.dtype) -> str:
    """Compute in one dtype and reduce in another; parameters and gradients keep theirs."""
    from torch.nn.parallel.distributed import _MixedPrecision

    module = _mlp(seed=rank)
    config = _MixedPrecision(param_dtype=low, reduce_dtype=reduce)
    wrapped = subject.wrap(module, bucket_cap_mb=1e-4, mixed_precision=config)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def loss(module: nn.Module, step: int, rank: int) -> Tensor:
        return module(batch(step, rank).to(low)).square().mean()  # type: ignore[no-any-return]

    for step in range(4):
        twin = _mlp(seed=0)
        twin.load_state_dict(module.state_dict())
        local = local_gradients(twin.to(low), loss, step, range(world_size))
        module.zero_grad()
        loss(wrapped, step, rank).backward()
        subject.finish(wrapped, optimizer)
        where = f"computes in {low}, reduces in {reduce}, iteration {step}, rank {rank}"
        for name, parameter in module.named_parameters():
            if parameter.dtype != torch.float32 or parameter.grad is None or parameter.grad.dtype != torch.float32:
                return f"{where}: {name!r} or its gradient is not of torch.float32"
            parts = torch.stack([gradient for one in local if (gradient := one[name]) is not None]).double()
            if problem := outside(parameter.grad, parts, reduce):
                return f"{where}: gradient of {name!r}: {problem}"
        optimizer.step()
    return ""


# Sparse gradients that only some ranks have


class _SparseOrNot(nn.Module):
    """An embedding with sparse gradients that forward may leave out."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.head = nn.Embedding(7, 6, sparse=True), nn.Linear(6, 3)

    def forward(self, x: Tensor, *, embeds: bool) -> Tensor:
        if embeds:
            x = x + self.embedding(x.abs().mul(3).long() % 7).sum(dim=1)
        return self.head(x)  # type: ignore[no-any-return]


def sparse_on_some_ranks(_rank: int, world_size: int, subject: Subject) -> str:
    """Use the embedding on one rank, on all but one, on all and on none."""

    def loss(module: nn.Module, step: int, rank: int) -> Tensor:
        embeds = (rank == 0, rank != 0, True, False)[step % 4]
        return module(batch(step, rank), embeds=embeds).square().mean()  # type: ignore[no-any-return]

    return train(subject, _SparseOrNot, loss, range(world_size), 6, find_unused_parameters=True)


# Gradients that no rank adds to


def untouched_gradients(rank: int, world_size: int, subject: Subject) -> str:
    """Fill gradients with a number for each rank; a gradient to which no rank adds must stay so."""
    module = _Chosen()
    wrapped = subject.wrap(module, bucket_cap_mb=25.0, find_unused_parameters=True)
    problem = ""  # returned at the end, because the other ranks go on
    values: list[list[float | None]] = [[None] * len(module.weights) for _ in range(world_size)]
    passes = [([0, 1], [0, 2]), ([0], [0]), ([2], [2]), ([3, 1], [1]), ([0], [3])]
    for step, (first, others) in enumerate(passes):
        torch.stack(wrapped(others if rank else first)).sum().backward()
        subject.finish(wrapped, torch.optim.SGD(module.parameters(), lr=0.1))
        used = [others if one else first for one in range(world_size)]
        for index, parameter in enumerate(module.weights):
            adding = [index in one for one in used]
            if any(adding):
                total = sum((values[one][index] or 0.0) + adding[one] for one in range(world_size))
                for own in values:
                    own[index] = total / world_size
            wanted = values[rank][index]
            want = None if wanted is None else torch.full_like(parameter, wanted)
            if not problem and not rank_bodies.close(parameter.grad, want):
                found = describe_difference(parameter.grad, want)
                problem = f"iteration {step}, rank {rank}: gradient {index}: {found}"
            for one in range(world_size):
                values[one][index] = float(1 + one + index)
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.fill_(1 + rank + index)
    return problem


# Checks


def check_group(bench: Bench) -> None:
    """Two groups train side by side, and the buffers of each are those of its first rank."""
    bench.needs("process_group")
    some = [(0,), (1,)]
    features = [{name: True} for name in ("gradient_as_bucket_view", "static_graph") if name in bench.subject.options]
    for options in ({}, *features):
        report(bench.run(in_groups, bench.subject, options, None))
    if "find_unused_parameters" in bench.subject.options:
        report(bench.run(in_groups, bench.subject, {"find_unused_parameters": True}, some))


def check_ignored(bench: Bench) -> None:
    """Parameters and buffers that the module asks to ignore stay each rank's own."""
    if not hasattr(bench.subject.make, IGNORE):
        raise NotSupportedError(f"it has no {IGNORE}")
    report(bench.run(ignored_parameters, bench.subject))


def check_outputs(bench: Bench) -> None:
    """Outputs in dicts, lists and dataclasses, of which the loss ignores one, may be changed in place."""
    bench.needs("find_unused_parameters")
    report(bench.run(nested_outputs, bench.subject, {}))
    if "gradient_as_bucket_view" in bench.subject.options:
        report(bench.run(nested_outputs, bench.subject, {"gradient_as_bucket_view": True}))


def check_mixed_precision(bench: Bench) -> None:
    """Forward and backward in one dtype, all-reduces in another; a class may refuse with an error."""
    bench.needs("mixed_precision")
    for low, reduce in PRECISIONS:
        if refusal := bench.averages_or_raises(in_mixed_precision, low, reduce):
            raise NotSupportedError(f"it refuses it: {refusal}")


def check_untouched(bench: Bench) -> None:
    """A gradient to which no rank adds stays as it was, whatever the script put there."""
    bench.needs("find_unused_parameters")
    report(bench.run(untouched_gradients, bench.subject))


def check_checkpoints(bench: Bench) -> None:
    """Re-entrant checkpoints that share a layer, under a static graph."""
    bench.needs("static_graph")
    report(bench.run(checkpoints, bench.subject))


def check_repeated_forward(bench: Bench) -> None:
    """Two forward passes, then one backward pass."""
    report(bench.run(repeated_forward, bench.subject))


def check_nested_no_sync(bench: Bench) -> None:
    """An inner no_sync does not end the outer one, and an exception ends it."""
    bench.needs("no_sync")
    report(bench.run(nested_no_sync, bench.subject))


def check_skipped(bench: Bench) -> None:
    """Buckets that no rank uses are skipped."""
    bench.needs("skip_all_reduce_unused_params", "find_unused_parameters")
    for cap_mb in (1e-6, 3e-5, 25.0):
        bench.try_program(skipping_program(bench.pool.world_size, cap_mb))
    if "register_comm_hook" in bench.methods:
        report(bench.run(skipped_for_hooks, bench.subject))


def check_cap_list(bench: Bench) -> None:
    """With a list of caps, each bucket has its own, and the last cap holds for all further ones."""
    bench.needs("bucket_cap_mb_list")
    bucket_layouts.check_list(bench)


def check_large(bench: Bench) -> None:
    """Gradients large enough that a class may copy each alone, between small ones."""
    shapes = ((4,), (150, 150), (3,), (300, 300), (2,), (2, 2))
    weights = tuple(Weight(shape) for shape in shapes)
    world_size = bench.pool.world_size
    every = range(len(weights))
    orders = tuple(tuple((index * 5 + rank) % len(weights) for index in every) for rank in range(world_size))
    rows = (1,) * world_size
    views = [{"gradient_as_bucket_view": True}] if "gradient_as_bucket_view" in bench.subject.options else []
    for options in ({}, *views):
        bench.try_program(Program(weights, (Step("train", orders, rows),) * 3, {"bucket_cap_mb": 25.0, **options}))
    if "find_unused_parameters" in bench.subject.options:
        some = tuple((rank % 2, 2, 3 + rank % 2) for rank in range(world_size))
        for options in ({}, *views):
            every_option = {"bucket_cap_mb": 25.0, "find_unused_parameters": True, **options}
            bench.try_program(Program(weights, (Step("train", some, rows),) * 3, every_option))


CHECKS = {
    "large gradients": check_large,
    "repeated forward passes": check_repeated_forward,
    "nested no_sync": check_nested_no_sync,
    "process group": check_group,
    "ignored parameters": check_ignored,
    "nested outputs": check_outputs,
    "untouched gradients": check_untouched,
    "mixed precision": check_mixed_precision,
    "checkpoints": check_checkpoints,
    "skipped all-reduces": check_skipped,
    "list of bucket caps": check_cap_list,
}
"""Checks by name."""
