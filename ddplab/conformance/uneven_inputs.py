"""Uneven inputs: under Join, ranks without inputs count as zero gradients, and all end with one model."""

import inspect
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .check_runner import Bench
from .class_under_test import Subject
from .local_training import FindingError
from .real_models import batch, build, difference, differing_ranks, local_gradients, mlp, square
from .training_programs import BUFFER_OPTIONS

LATE_S = 0.03
"""By how much a rank is later than the others, where averages are over the ranks with inputs."""


@dataclass(frozen=True, kw_only=True)
class Uneven:
    """How many inputs each rank has, and how it trains.

    Attributes:
        batches: Number of batches by rank.
        buffer: Whether the module counts its samples in a buffer.
        accumulate: Whether every other batch is accumulated under `no_sync`; then `batches` are even.
        divide_by_all: Whether averages are over all ranks. False: over those with inputs.
        options: Arguments for the class.
    """

    batches: tuple[int, ...]
    buffer: bool = False
    accumulate: bool = False
    divide_by_all: bool = True
    options: dict[str, Any] = field(default_factory=dict)


class _Counting(nn.Module):
    """A perceptron that may count its samples, beside a layer that is never used."""

    def __init__(self, seed: int, *, counts: bool, unused: bool) -> None:
        super().__init__()
        self.layers = mlp(seed)
        self.unused = nn.Linear(2, 2) if unused else nn.Identity()
        if counts:
            self.register_buffer("samples", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, count: int = 0) -> Tensor:
        if "samples" in self._buffers:
            self.get_buffer("samples").add_(count)
        return self.layers(x)  # type: ignore[no-any-return]


def compare(rank: int, world_size: int, subject: Subject, how: Uneven) -> str:
    """Train while ranks run out of inputs; returns what is wrong on this rank."""
    unused = bool(how.options.get("find_unused_parameters"))
    module, twin = (_Counting(seed, counts=how.buffer, unused=unused) for seed in (rank, 0))
    wrapped: Any = subject.wrap(module, bucket_cap_mb=1e-4, **how.options)
    join: dict[str, Any] = {} if how.divide_by_all else {"divide_by_initial_world_size": False}
    if not join.keys() <= inspect.signature(wrapped.join).parameters.keys():
        return "not supported"
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    counts = _counts(how)
    passes = 2 if how.accumulate else 1

    def loss(module: nn.Module, step: int, rank: int) -> Tensor:
        losses = [module(batch(step - number, rank)).square().mean() for number in range(passes)[::-1]]
        return torch.stack(losses).sum()

    problem = ""  # returned at the end, because the other ranks go on
    with wrapped.join(**join):
        for step in range(how.batches[rank]):
            where = f"{how.batches} batches, iteration {step}, rank {rank}"
            averages = (step + 1) % passes == 0
            if step % passes == 0:
                optimizer.zero_grad()
                twin.load_state_dict(module.state_dict())
            if not how.divide_by_all and rank == (step + 1) % world_size:
                time.sleep(LATE_S)  # the others must not divide before this rank has been counted
            with nullcontext() if averages else wrapped.no_sync():
                wrapped(batch(step, rank), rank + 1).square().mean().backward()
            if how.buffer and (got := module.get_buffer("samples").item()) != counts[step][rank]:
                problem = problem or f"{where}: the buffer is {got}, expected {counts[step][rank]}"
            if averages:
                having = [one for one in range(world_size) if step < how.batches[one]]
                local = local_gradients(twin, loss, step, having)
                if wrong := difference(module, local, world_size if how.divide_by_all else None):
                    problem = problem or f"{where}: {wrong}"
                optimizer.step()
    last = max(range(world_size), key=how.batches.__getitem__)
    differing = differing_ranks(module.state_dict().values(), last, world_size)
    if problem:
        return problem
    if differing:
        return (
            f"{how.batches} batches: ranks {differing} end with another model than rank {last}, the last with inputs"
        )
    final = counts[-1][max(one for one in range(world_size) if how.batches[one] == max(how.batches))]
    if how.buffer and module.get_buffer("samples").item() != final:
        return f"{how.batches} batches: the buffer ends as {module.get_buffer('samples').item()}, expected {final}"
    return ""


def sparse_under_join(rank: int, world_size: int, subject: Subject) -> str:
    """Train an embedding with sparse gradients while ranks run out of inputs."""
    module, twin = (build("sparse embedding", seed) for seed in (rank, 0))
    wrapped: Any = subject.wrap(module, bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    with wrapped.join():
        for step in range(2 * rank):
            optimizer.zero_grad()
            twin.load_state_dict(module.state_dict())
            square(wrapped, step, rank).backward()
            having = [one for one in range(world_size) if step < 2 * one]
            if problem := difference(module, local_gradients(twin, square, step, having), world_size):
                return f"sparse gradients under Join, iteration {step}, rank {rank}: {problem}"
            optimizer.step()
    return ""


def _counts(how: Uneven) -> list[list[int]]:
    """Return the buffer of each rank after each step: before it, that of the highest rank with inputs is sent."""
    counts, steps = [0] * len(how.batches), []
    for step in range(max(how.batches)):
        having = [rank for rank, batches in enumerate(how.batches) if step < batches]
        if not how.accumulate or step % 2 == 0:
            counts = [counts[having[-1]]] * len(counts)
        counts = [count + (rank + 1) * (rank in having) for rank, count in enumerate(counts)]
        steps.append(counts)
    return steps


def check(bench: Bench) -> None:
    """Ranks run out of inputs in any order, some at once; with buffers, no_sync, and unused parameters."""
    bench.needs("join")
    ranks = range(bench.world_size)
    up, down = tuple(1 + rank for rank in ranks), tuple(2 * rank for rank in ranks)[::-1]
    cases = [
        Uneven(batches=batches, divide_by_all=divide_by_all)
        for batches in (up, down)
        for divide_by_all in (True, False)
    ]
    if set(BUFFER_OPTIONS) & bench.subject.options:
        cases += [Uneven(batches=batches, buffer=True) for batches in (up, down)]
    if "no_sync" in bench.methods:
        cases += [
            Uneven(batches=down, accumulate=True, divide_by_all=divide_by_all) for divide_by_all in (True, False)
        ]
    if (
        "find_unused_parameters" in bench.subject.options
    ):  # torch's own zeros count as a use on ranks that ended first
        unused = {"find_unused_parameters": True}
        cases += [Uneven(batches=up, options=unused, divide_by_all=divide_by_all) for divide_by_all in (True, False)]
    if "gradient_as_bucket_view" in bench.subject.options:
        cases.append(Uneven(batches=down, options={"gradient_as_bucket_view": True}, divide_by_all=False))
    for how in cases:
        for problem in bench.run(compare, bench.subject, how):
            if problem and problem != "not supported":
                raise FindingError(problem)
