"""Uneven inputs: under Join, ranks without inputs count as zero gradients, and all end with one model."""

import inspect
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .check_runner import VIEWS, Bench
from .class_under_test import Subject
from .real_models import SPARSE_MODELS, Training, batch, differing_ranks, mean_square, mlp
from .training_programs import BUFFER_OPTIONS

LATE_S = 0.03
"""By how much a rank is later than the others, where averages are over the ranks with inputs."""


class _Counting(nn.Module):
    """A model that may count its samples, perhaps beside a layer that is never used."""

    def __init__(self, *, counts: bool, unused: bool, sparse: bool) -> None:
        super().__init__()
        self.layers = SPARSE_MODELS["sparse embedding"]() if sparse else mlp()
        self.unused = nn.Linear(2, 2) if unused else nn.Identity()
        if counts:
            self.register_buffer("samples", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, count: int = 0) -> Tensor:
        for samples in self.buffers():
            samples.add_(count)
        return self.layers(x)  # type: ignore[no-any-return]


def compare(
    rank: int,
    world_size: int,
    subject: Subject,
    batches: Sequence[int],
    *,
    buffer: bool = False,
    accumulate: bool = False,
    divide_by_all: bool = True,
    sparse: bool = False,
    what: str = "",
    **options: Any,
) -> str:
    """Train while ranks run out of inputs, with `what` in a second epoch none; returns what is wrong on this rank.

    `batches` has the number of batches by rank. With `buffer`, the module counts its samples in a buffer; with
    `accumulate`, every other batch is accumulated under `no_sync`, and `batches` are even; with `sparse`, the module
    is an embedding with sparse gradients. Without `divide_by_all`, averages are over the ranks with inputs.
    """
    unused = "find_unused_parameters" in options
    training = Training(subject, partial(_Counting, counts=buffer, unused=unused, sparse=sparse), **options)
    module, wrapped = training.module, training.wrapped
    join: dict[str, Any] = {} if divide_by_all else {"divide_by_initial_world_size": False}
    if not join.keys() <= inspect.signature(wrapped.join).parameters.keys():
        return ""  # not supported
    passes = 2 if accumulate else 1
    counts = _counts(batches, passes)

    def run(module: nn.Module, step: int, rank: int) -> Tensor:
        return torch.stack([mean_square(module, step - number, rank) for number in range(passes)[::-1]]).sum()

    described = f"{'sparse gradients under Join, ' if sparse else ''}{batches} batches"
    problem = ""  # returned at the end, because the other ranks go on
    with wrapped.join(**join):
        for step in range(batches[rank]):
            averages = (step + 1) % passes == 0
            if step % passes == 0:
                training.optimizer.zero_grad()
            if not divide_by_all and rank == (step + 1) % world_size:
                time.sleep(LATE_S)  # late on purpose: a class that divides before this rank is counted must fail
            with nullcontext() if averages else wrapped.no_sync():
                wrapped(batch(step, rank), rank + 1).square().mean().backward()
            if buffer and (got := module.get_buffer("samples").item()) != counts[step][rank]:
                wrong = f"iteration {step}, rank {rank}: the buffer is {got}, expected {counts[step][rank]}"
                problem = problem or f"{described}, {wrong}"
            if averages:
                having = [one for one in range(world_size) if step < batches[one]]
                if wrong := training.wrong(run, step, having, divisor=world_size if divide_by_all else None):
                    problem = problem or f"{described}, {wrong}"
                training.optimizer.step()
    if what:
        training.optimizer.zero_grad()
        with wrapped.join(**join):
            mean_square(wrapped, 0, rank).backward()
        wrong = training.wrong(mean_square, 0)
        problem = problem or (wrong and f"{what}, {wrong}")
    last = max(range(world_size), key=batches.__getitem__)
    differing = differing_ranks(module.state_dict().values(), last)
    if problem or differing:
        told = f"{described}: ranks {differing} end with another model than rank {last}, the last with inputs"
        return problem or told
    final = counts[-1][max(one for one in range(world_size) if batches[one] == max(batches))]
    if buffer and (got := module.get_buffer("samples").item()) != final:
        return f"{described}: the buffer ends as {got}, expected {final}"
    return ""


def _counts(batches: Sequence[int], passes: int) -> list[list[int]]:
    """Return the buffer of each rank after each step: before it, that of the highest rank with inputs is sent."""
    counts, steps = [0] * len(batches), []
    for step in range(max(batches)):
        having = [rank for rank, own in enumerate(batches) if step < own]
        if step % passes == 0:
            counts = [counts[having[-1]]] * len(counts)
        counts = [count + (rank + 1) * (rank in having) for rank, count in enumerate(counts)]
        steps.append(counts)
    return steps


def check(bench: Bench) -> None:
    """Ranks run out of inputs in any order, some at once; with buffers, no_sync, and unused parameters."""
    bench.needs("join")
    options = bench.offer.options
    ranks = range(bench.world_size)
    up, down = tuple(1 + rank for rank in ranks), tuple(2 * rank for rank in reversed(ranks))
    divisors = [{"divide_by_all": True}, {"divide_by_all": False}]
    cases: list[dict[str, Any]] = [{"batches": batches} | divisor for batches in (up, down) for divisor in divisors]
    if set(BUFFER_OPTIONS) & options:
        cases += [{"batches": batches, "buffer": True} for batches in (up, down)]
    if "no_sync" in bench.methods:
        cases += [{"batches": down, "accumulate": True} | divisor for divisor in divisors]
    if "find_unused_parameters" in options:  # torch's own zeros count as a use on ranks that ended first
        cases += [{"batches": up, "find_unused_parameters": True} | divisor for divisor in divisors]
    if VIEWS in options:
        cases.append({"batches": down, VIEWS: True, "divide_by_all": False})
    bench.try_body(compare, up)
    for case in cases:
        bench.try_body(compare, what=f"{case['batches']} batches, then Join again", **case)
