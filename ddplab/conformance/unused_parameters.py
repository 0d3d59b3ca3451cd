"""Parameters without an average: unused ones in nested outputs, skipped all-reduces, sparse ones, ignored ones."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .check_runner import Bench
from .class_under_test import IGNORE, Subject
from .comm_hooks import averaging_hook
from .local_training import describe_difference, same
from .real_models import STEPS, Assembled, Training, batch, build, difference, mean_square, words
from .training_programs import PLAIN, program_of


@dataclass
class _Pair:
    left: Tensor
    right: Tensor


def _heads() -> nn.Module:
    """Build five heads, whose outputs are in a dict, a list and a dataclass; the last head is never used."""

    def forward(own: Any, x: Tensor) -> dict[str, Any]:
        a, b, c, d = (head(x) for head in list(own.heads)[:4])
        return {"first": a, "others": [b, _Pair(c, d)]}

    return Assembled(forward, heads=nn.ModuleList(nn.Linear(6, 3) for _ in range(5)))


def _of_heads(module: nn.Module, step: int, rank: int) -> Tensor:
    """Change an output in place, and leave one out."""
    output = module(batch(step, rank))
    used = output["others"][0] if step % 2 else output["first"]
    used.mul_(2)
    pair = output["others"][1]
    return (used + pair.left * pair.right).square().mean()  # type: ignore[no-any-return]


NESTED_OUTPUTS: dict[str, Any] = {"make": _heads, "run": _of_heads, "steps": 4, "find_unused_parameters": True}
"""Arguments of `trains`."""


def _chosen() -> nn.Module:
    """Build weights of which forward uses some."""
    weights = nn.ParameterList(nn.Parameter(torch.ones(2 + index)) for index in range(4))
    return Assembled(lambda own, used: [own.weights[index].sum() for index in used], weights=weights)


USED = ((0, 2), (1, 2, 3), (3,), (0, 1, 2), (0,))
"""Weights that each step uses, the same ones on all ranks."""
SKIPPING: dict[str, Any] = {"skip_all_reduce_unused_params": True, "find_unused_parameters": True}


def skipped_for_hooks(_rank: int, _world_size: int, subject: Subject) -> str:
    """Train with a comm hook, which gets the buckets that are not skipped."""
    training = Training(subject, _chosen, bucket_cap_mb=1e-6, **SKIPPING)
    seen: list[tuple[int, bool]] = []

    def look(state: Any, bucket: Any) -> None:
        state.append((bucket.buffer().numel(), bucket.is_last()))

    training.wrapped.register_comm_hook(seen, averaging_hook(look))
    for step, used in enumerate(USED):
        seen.clear()
        training.backward(lambda module, step, _: torch.stack(module(USED[step])).sum(), step)
        sizes = sorted(2 + index for index in used)
        if sorted(size for size, _ in seen) != sizes:
            return f"iteration {step}: the comm hook got buckets of {seen} elements, expected {sizes} in some order"
        if any(is_last for _, is_last in seen[:-1]):  # torch names none if the last bucket of all is skipped
            return f"iteration {step}: a bucket was called the last, but others followed: {seen}"
    return ""


def used_by_no_rank(_rank: int, _world_size: int, subject: Subject) -> str:
    """Train without options a module whose first weight no rank uses; its gradient may be None or zero."""
    training, problem = Training(subject, _chosen, bucket_cap_mb=1e-6), ""
    first = next(iter(training.module.parameters()))

    def run(module: nn.Module, _step: int, rank: int) -> Tensor:
        return torch.stack(module([1, 2, 3])).sum() * (rank + 1)

    for step in range(STEPS):
        training.backward(run, step)
        first.grad = None if first.grad is None or not bool(first.grad.any()) else first.grad
        problem = problem or training.wrong(run, step)
    return problem and f"a parameter that no rank uses comes first: {problem}"


def _sparse_or_not() -> nn.Module:
    """Build an embedding with sparse gradients that forward may leave out."""

    def forward(own: Any, x: Tensor, *, embeds: bool) -> Any:
        return own.head(x + own.embedding(words(x)).sum(dim=1) if embeds else x)

    return Assembled(forward, embedding=nn.Embedding(7, 6, sparse=True), head=nn.Linear(6, 3))


def _embeds_on_some_ranks(module: nn.Module, step: int, rank: int) -> Tensor:
    """Use the embedding on one rank, on all but one, on all and on none."""
    embeds = (rank == 0, rank != 0, True, False)[step % 4]
    return module(batch(step, rank), embeds=embeds).square().mean()  # type: ignore[no-any-return]


SPARSE_ON_SOME_RANKS: dict[str, Any] = {"make": _sparse_or_not, "run": _embeds_on_some_ranks, "steps": 6}
"""Arguments of `trains`."""


def untouched_gradients(rank: int, world_size: int, subject: Subject) -> str:
    """Fill gradients with a number for each rank; a gradient to which no rank adds must stay so."""
    training = Training(subject, _chosen, bucket_cap_mb=25.0, find_unused_parameters=True)
    weights = list(training.module.parameters())
    problem = ""  # returned at the end, because the other ranks go on
    values = torch.full((world_size, len(weights)), torch.nan)  # of the gradients of each rank; NaN: None
    passes = [([0, 1], [0, 2]), ([0], [0]), ([2], [2]), ([3, 1], [1]), ([0], [3])]
    for step, (first, others) in enumerate(passes):
        torch.stack(training.wrapped(others if rank else first)).sum().backward()
        training.finish()
        adding = torch.zeros_like(values)
        adding[0, first] = adding[1:, others] = 1
        used = adding.any(dim=0)
        values[:, used] = (values.nan_to_num() + adding).mean(dim=0)[used]
        for index, parameter in enumerate(weights):
            want = None if values[rank, index].isnan() else torch.full_like(parameter, float(values[rank, index]))
            if not problem and not same(parameter.grad, want, rtol=1e-6):
                found = describe_difference(parameter.grad, want)
                if parameter.grad is None and adding[rank, index]:
                    found += "; this rank has made one: was it taken for unused before the pass ended?"
                ranks = adding[:, index].nonzero().flatten().tolist()
                adds = f"ranks {ranks} add" if ranks else "no rank adds"
                problem = f"iteration {step}, rank {rank}: gradient {index}, to which {adds}: {found}"
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.fill_(1 + rank + index)
        values = torch.arange(1.0, 1 + world_size)[:, None] + torch.arange(len(weights))
    return problem


def ignored_parameters(rank: int, world_size: int, subject: Subject) -> str:
    """Train with parameters and a buffer that the module asks to ignore, and no others: they stay each rank's own."""
    names = ("ignored.weight", "ignored.bias")

    def make() -> nn.Module:
        parts = {"not_ignored": nn.Linear(6, 3), "ignored": nn.Linear(6, 3)}
        parts["ignored"].register_parameter("bias2", nn.Parameter(torch.ones(3)))  # whose name only looks similar
        module = Assembled(lambda own, x: own.not_ignored(x) + own.ignored(x) * own.ignored.bias2, **parts)
        module.register_buffer("count", torch.rand(()))
        getattr(subject.make, IGNORE)(module, [*names, "count"])
        return module

    training = Training(subject, make)
    module, own = training.module, build(make, rank)
    for name in (*names, "count"):
        if not torch.equal(module.state_dict()[name], own.state_dict()[name]):
            return f"rank {rank}: construction overwrote {name!r}, which the module asks to ignore"
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
        local = [one | {name: alone[name] for name in names} for one in everyones]
        if problem := difference(module, local, tolerance=subject.tolerance):
            return f"iteration {step}, rank {rank}: {problem}"
        training.optimizer.step()
    return ""


def check_skipped(bench: Bench) -> None:
    """Buckets that no rank uses are skipped."""
    bench.needs(*SKIPPING)
    for cap_mb in (1e-6, 3e-5, 25.0):
        how: dict[str, Any] = {"used": lambda step, _: USED[step], "options": SKIPPING | {"bucket_cap_mb": cap_mb}}
        bench.try_program(program_of(PLAIN, ["train"] * len(USED), bench.world_size, **how))
    if "register_comm_hook" in bench.methods:
        bench.try_body(skipped_for_hooks)
