"""Local training: what a program does on a single process with the batches of all ranks, and comparison with it.

Each rank's loss is computed on the same weights, one rank after the other, and the gradients are averaged as data
parallelism must: what a rank accumulated under `no_sync` counts in the next average, a weight that one rank did not
use counts as zero there, and a gradient that no rank used stays as it was.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .class_under_test import Subject
from .training_programs import (
    BUFFER_OPTIONS,
    Kind,
    Net,
    Program,
    Seen,
    buffer_values,
    loss_of,
    optimizer_of,
    run_on_rank,
    zero_gradients,
)

Habit = Callable[[Kind, Kind], bool]
"""Whether a class broadcasts buffers before a forward pass, by the kinds of the forward pass before it and of it."""
AS_TORCH = "in each forward pass that follows a synchronised one"
HABITS: Mapping[str, Habit] = {
    AS_TORCH: lambda before, _now: before in ("train", "forward"),
    "in synchronised forward passes": lambda _before, now: now in ("train", "forward"),
    "in all forward passes outside of no_sync": lambda _before, now: now != "accumulate",
    "in all forward passes": lambda _before, _now: True,
}
"""When classes broadcast buffers. All of them give equal buffers in the forward passes whose gradients are averaged,
unless passes under `no_sync` come before."""


class FindingError(Exception):
    """The subject is wrong; the message says where and by how much.

    Attributes:
        program: The program that shows the fault. None: there is none.
    """

    def __init__(self, message: str, program: Program | None = None) -> None:
        super().__init__(message)
        self.program = program


class Ranks(Protocol):
    """Ranks that run bodies: a pool, or a bench with its time-outs."""

    world_size: int

    def run(self, body: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a body on every rank; returns the results by rank."""
        ...


class WeakProgramError(Exception):
    """A program that could not show a fault, because all of its gradients are zero."""


@dataclass
class _Rank:
    """What one rank would have: gradients that may differ between the ranks, and its buffer."""

    gradients: dict[str, Tensor | None]
    samples: int = 0


def run_locally(program: Program, world_size: int, habit: Habit = HABITS[AS_TORCH]) -> list[list[Seen]]:
    """Run a program on this process alone; returns what each rank must see after each step, by step and rank.

    Args:
        program: The program.
        world_size: Number of ranks.
        habit: When the class broadcasts buffers.

    Raises:
        WeakProgramError: All gradients are zero.
    """
    net = Net(program)
    optimizer = optimizer_of(program, net)
    names = [name for name, _ in net.named_parameters()]
    ranks = [_Rank(dict.fromkeys(names)) for _ in range(world_size)]
    expected = []
    before: Kind | None = None  # buffers are equal at first
    sends_buffers = False not in (program.options.get(name) for name in BUFFER_OPTIONS)
    largest = 0.0
    for number, step in enumerate(program.steps):
        if step.kind == "change_lr":
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        elif step.kind in ("train", "accumulate"):
            used = []
            for rank, state in enumerate(ranks):
                local = _local_gradients(net, program, number, rank, world_size)
                used.append({name for name, gradient in local.items() if gradient is not None})
                state.gradients = {name: _zeroed(one, step.zero) for name, one in state.gradients.items()}
                state.gradients = {name: _sum(state.gradients[name], local[name]) for name in names}
            if step.kind == "train":
                _average(ranks, set().union(*used))
                largest = max([largest, *(_size(one) for one in ranks[0].gradients.values())])
                if step.optimize:
                    for name, parameter in net.named_parameters():
                        parameter.grad = ranks[0].gradients[name]
                    optimizer.step()
                    zero_gradients(net, "none")
        elif step.kind == "forward":
            for state in ranks:
                state.gradients = {name: _zeroed(one, step.zero) for name, one in state.gradients.items()}
        if step.kind != "change_lr":
            if before is not None and sends_buffers and habit(before, step.kind):
                for state in ranks:
                    state.samples = ranks[0].samples
            if step.kind != "evaluate" and not (step.evaluation and step.kind != "forward"):
                for rank, state in enumerate(ranks):
                    state.samples += step.rows[rank]
            before = step.kind
        expected.append([_expected(net, program, state) for state in ranks])
    if not largest:
        raise WeakProgramError
    return expected


def check_program(subject: Subject, program: Program, ranks: Ranks, habits: Sequence[str] = (AS_TORCH,)) -> list[str]:
    """Run a program on ranks and compare every rank with local training, exactly.

    Args:
        subject: The class under test.
        program: The program.
        ranks: The ranks.
        habits: The class may broadcast buffers in one of these ways.

    Returns:
        Those of `habits` with which everything is equal.

    Raises:
        FindingError: They differ.
        WeakProgramError: The program could not show a fault.
        RankError: A rank failed or hung.
    """
    expected = {habit: run_locally(program, ranks.world_size, HABITS[habit]) for habit in habits}
    seen: list[list[Seen]] = ranks.run(run_on_rank, subject, program)
    fitting = list(habits)
    for number in range(len(program.steps)):
        findings = {}
        for habit in fitting:
            try:
                for rank in range(ranks.world_size):
                    compare(seen[rank][number], expected[habit][number][rank], iteration=number, rank=rank)
            except FindingError as finding:
                findings[habit] = finding
        if len(findings) == len(fitting):
            raise findings[fitting[0]]
        fitting = [habit for habit in fitting if habit not in findings]
    return fitting


def compare(got: Seen, expected: Seen, *, iteration: int, rank: int) -> None:
    """Compare what a rank saw with what it must see, exactly.

    Raises:
        FindingError: They differ; the message names iteration, parameter, bucket and ratio.
    """
    where = f"iteration {iteration}, rank {rank}"
    names = list(expected.parameters)
    for kind, mine, theirs in (
        ("gradient", got.gradients, expected.gradients),
        ("parameter", got.parameters, expected.parameters),
        ("buffer", got.buffers, expected.buffers),
    ):
        for name, want in theirs.items():
            have = mine.get(name)
            if same(have, want):
                continue
            bucket = _bucket_of(names.index(name), got.buckets) if kind == "gradient" else ""
            raise FindingError(f"{where}: {kind} of {name!r}{bucket}: {describe_difference(have, want)}")


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors are equal bit for bit, NaN included; also two that are missing."""
    if a is None or b is None:
        return a is b
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        and (torch.equal(a.isnan(), b.isnan()))
    )


def close(got: Tensor | None, want: Tensor | None) -> bool:
    """Whether a gradient is another one up to rounding, with NaN and infinities at the same places."""
    if got is None or want is None:
        return got is want
    return torch.allclose(got, want, rtol=1e-6, atol=0, equal_nan=True)


def describe_difference(got: Tensor | None, expected: Tensor | None) -> str:
    """Say how two tensors differ; by a ratio, if that is all."""
    if got is None:
        return "got None, expected a tensor"
    if expected is None:
        return "got a tensor, expected None"
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"got {got.dtype} {tuple(got.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    wrong = (got != expected) & ~(got.isnan() & expected.isnan())
    ratios = (got[wrong].double() / expected[wrong].double()).unique()
    if len(ratios) == 1 and bool(ratios.isfinite()):
        share = "" if bool(wrong.all()) else f" at {int(wrong.sum())} of {wrong.numel()} elements"
        return f"{float(ratios[0]):.6g} of the expected{share}"
    first = tuple(wrong.nonzero()[0].tolist())
    at = f" at {list(first)}" if first else ""
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements differ; got {got[first].item():.9g}{at}, "
        f"expected {expected[first].item():.9g}"
    )


def check_ranks_equal(seen: Sequence[Seen], *, iteration: int) -> None:
    """Check that all ranks have equal parameters, and equal buffers, as far as they have any.

    Raises:
        FindingError: They differ.
    """
    for rank, other in enumerate(seen):
        for kind, mine, first in (
            ("parameter", other.parameters, seen[0].parameters),
            ("buffer", other.buffers, seen[0].buffers),
        ):
            for name, value in first.items():
                if not same(mine[name], value):
                    raise FindingError(
                        f"iteration {iteration}: {kind} {name!r} on rank {rank} is not that of rank 0: "
                        f"{describe_difference(mine[name], value)}"
                    )


def _local_gradients(net: Net, program: Program, number: int, rank: int, world_size: int) -> dict[str, Tensor | None]:
    counted, net.counts = net.counts, False
    loss = loss_of(net, program, number, rank, world_size)
    net.counts = counted
    trainable = {name: one for name, one in net.named_parameters() if one.requires_grad}
    found = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True)
    by_name = dict(zip(trainable, found, strict=True))
    return {name: by_name.get(name) for name, _ in net.named_parameters()}


def _average(ranks: Sequence[_Rank], used: set[str]) -> None:
    for name in used:
        total = sum(one for rank in ranks if (one := rank.gradients[name]) is not None)
        assert isinstance(total, Tensor)  # at least one rank used it
        for rank in ranks:
            rank.gradients[name] = total / len(ranks)


def _zeroed(gradient: Tensor | None, zero: str) -> Tensor | None:
    if zero == "keep" or gradient is None:
        return gradient
    return None if zero == "none" else torch.zeros_like(gradient)  # values are compared, not their order in memory


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _size(tensor: Tensor | None) -> float:
    return float(tensor.abs().sum()) if tensor is not None else 0.0


def _expected(net: Net, program: Program, state: _Rank) -> Seen:
    return Seen(
        {name: None if one is None else one.clone() for name, one in state.gradients.items()},
        {name: one.detach().clone() for name, one in net.named_parameters()},
        buffer_values(state.samples) if program.buffer else {},
        None,
    )


def _bucket_of(index: int, buckets: Sequence[Sequence[int]] | None) -> str:
    for number, bucket in enumerate(buckets or ()):
        if index in bucket:
            return f" (bucket {number} of {len(buckets or ())})"
    return ""
