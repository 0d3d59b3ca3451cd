"""Local training: what a program does on a single process with the batches of all ranks, and comparison with it.

Each rank's loss is computed on the same weights, one rank after the other, and the gradients are averaged as data
parallelism must: what a rank accumulated under `no_sync` counts in the next average, a weight that one rank did not
use counts as zero there, and a gradient that no rank used stays as it was.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import training_programs
from .class_under_test import Subject, refusing
from .training_programs import Net, Program, Seen, StepKind, loss_of, on_cpu, optimizer_of

if TYPE_CHECKING:
    from ..reference.launch import RankPool
    from .check_runner import Bench

Habit = Callable[[StepKind, StepKind], bool]
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
    """The subject is wrong: `program` shows it, if there is one; if it is `milder`, the level is at most `should`."""

    def __init__(self, message: str, program: Program | None = None, *, milder: bool = False) -> None:
        super().__init__(message)
        self.program, self.milder = program, milder


class WeakProgramError(Exception):
    """A program that could not show a fault, because all of its gradients are zero, or all of a parameter None."""


def run_locally(
    program: Program, world_size: int, habit: Habit = HABITS[AS_TORCH], device: str | None = None
) -> list[list[Seen]]:
    """Run a program on this process alone; returns what each rank must see after each step, by step and rank.

    `habit` is when the class broadcasts buffers, and `device` where to train: Adam rounds otherwise on a GPU. Raises
    WeakProgramError if all gradients are zero.
    """
    net = Net(replace(program, buffer=False)).to(device)
    optimizer = optimizer_of(program, net)
    names = [name for name, _ in net.named_parameters()]
    ranks: list[dict[str, Tensor | None]] = [dict.fromkeys(names) for _ in range(world_size)]  # gradients
    used = set[str]()  # since the last average
    samples = [0] * world_size
    expected = list[list[Seen]]()
    before: StepKind | None = None  # buffers are equal at first
    sends_buffers = False not in (program.options.get(name) for name in training_programs.BUFFER_OPTIONS)
    is_weak, largest = True, dict.fromkeys(names, 0.0)
    for number, step in enumerate(program.steps):
        if step.kind == "change_lr":
            training_programs.halve_learning_rate(optimizer)
        else:
            if before is not None and sends_buffers and habit(before, step.kind):
                samples = samples[:1] * world_size
            if step.kind == "forward" or (step.kind != "evaluate" and not step.evaluation):
                samples = [count + rows for count, rows in zip(samples, step.rows, strict=True)]
            before = step.kind
        if step.kind in ("train", "accumulate", "forward"):
            for own in ranks:
                own.update({name: _zeroed(own[name], step.zero, index) for index, name in enumerate(names)})
        if step.kind in ("train", "accumulate"):
            added = [gradients_of_rank(net, program, number, rank, world_size) for rank in range(world_size)]
            used.update(name for name in names if any(new[name] is not None for new in added))
            for kept, new in zip(ranks, added, strict=True):
                kept.update({name: _sum(kept[name], new[name]) for name in names})
        if step.kind == "train":
            for name in used:
                parts = [one for gradients in ranks if (one := gradients[name]) is not None]
                if not parts:
                    raise WeakProgramError  # they were set to None after passes under `no_sync`
                total = torch.stack(parts).sum(dim=0)
                largest[name] = max([largest[name], *(float(one.abs().max()) for one in parts if one.numel())])
                is_weak &= not bool(total.any())
                for gradients in ranks:
                    gradients[name] = total / world_size
            used.clear()
            if step.optimize:
                for name, parameter in net.named_parameters():
                    parameter.grad = ranks[0][name]
                optimizer.step()
        parameters = {name: on_cpu(one.detach()) for name, one in net.named_parameters()}
        expected.append([])
        for own, count in zip(ranks, samples, strict=True):
            seen = {name: None if one is None else on_cpu(one) for name, one in own.items()}
            buffers = training_programs.buffer_values(count) if program.buffer else {}
            expected[-1].append(Seen(seen, parameters, buffers, None, {**largest}))
    if is_weak:
        raise WeakProgramError
    return expected


def check_program(
    subject: Subject,
    program: Program,
    ranks: "RankPool | Bench",
    habits: Sequence[str] = (AS_TORCH,),
    words: str = "",
) -> list[str]:
    """Run a program on ranks and compare every rank with local training, exactly.

    Returns those of `habits`, ways in which the class may broadcast buffers, with which everything is equal. Raises
    FindingError if nothing is; WeakProgramError if the program could not show a fault; RefusalError if the class
    refuses it with an error that says one of the `words`, if there are any; and RankError if a rank failed or hung.
    """
    expected = {habit: run_locally(program, ranks.world_size, HABITS[habit], ranks.device) for habit in habits}
    body = partial(refusing, words, training_programs.run_on_rank) if words else training_programs.run_on_rank
    seen: list[list[Seen]] = ranks.run(body, subject, program)
    first = {habit: next(findings(seen, expected[habit], program, subject.tolerance), None) for habit in habits}
    if fitting := [habit for habit in habits if first[habit] is None]:
        return fitting
    raise FindingError(max(filter(None, first.values()), key=itemgetter(0))[1])  # of the habit that fitted longest


def findings(
    seen: list[list[Seen]], expected: list[list[Seen]], program: Program, tolerance: float, rtol: float = 0.0
) -> Iterator[tuple[int, str]]:
    """Yield iteration and description of each difference above a relative error.

    `seen` is what the ranks saw, by rank and step, and `expected` what they must see, by step and rank. With a
    `tolerance`, of the largest gradient, the weights differ after the first step of the program's optimiser; from
    then on only the ranks are compared, with the first one.
    """
    differs = False
    for number, (step, of_step) in enumerate(zip(program.steps, expected, strict=True)):
        for rank, want in enumerate(of_step):
            if tolerance:
                gradients = {} if differs else want.gradients
                want = want._replace(parameters=seen[0][number].parameters, gradients=gradients)
            if problem := compare(seen[rank][number], want, iteration=number, rank=rank, rtol=rtol, share=tolerance):
                yield number, problem + "; this pass is under no_sync" * (step.kind == "accumulate")
        differs |= step.kind == "train" and step.optimize


def compare(got: Seen, expected: Seen, *, iteration: int, rank: int, rtol: float = 0.0, share: float = 0.0) -> str:
    """Compare what a rank saw with what it must see, exactly, or up to an error: see `same`.

    Returns iteration, rank, parameter, bucket and ratio of the first difference; empty if there is none.
    """
    for kind, name, how in differences(got, expected, rtol, share):
        index, buckets = list(expected.parameters).index(name) if kind == "gradient" else -1, got.buckets or ()
        bucket = next((f" (bucket {n} of {len(buckets)})" for n, one in enumerate(buckets) if index in one), "")
        return f"iteration {iteration}, rank {rank}: {kind} of {name!r}{bucket}: {how}"
    return ""


def differences(got: Seen, expected: Seen, rtol: float = 0.0, share: float = 0.0) -> Iterator[tuple[str, str, str]]:
    """Yield kind, name and description of each tensor that differs."""
    for kind in ("gradient", "parameter", "buffer"):
        mine, theirs = getattr(got, f"{kind}s"), getattr(expected, f"{kind}s")
        if kind == "gradient" and not mine:
            continue  # an adapter's are gone after its step
        for name, want in theirs.items():
            if not same(mine.get(name), want, rtol, share * expected.largest.get(name, 0.0)):
                yield kind, name, describe_difference(mine.get(name), want, by_ratio=kind != "parameter")


def same(a: Tensor | None, b: Tensor | None, rtol: float = 0.0, atol: float = 0.0) -> bool:
    """Whether two tensors are equal, up to a relative or an absolute error, NaN included; also two missing ones."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True)


def describe_difference(got: Tensor | None, expected: Tensor | None, *, by_ratio: bool = True) -> str:
    """Say how two tensors differ; if that is all, `by_ratio`, which means nothing for parameters."""
    if got is None:
        return "got None, expected a tensor"
    if expected is None:
        return "got a tensor, expected None"
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"got {got.dtype} {tuple(got.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    wrong = (got != expected) & ~(got.isnan() & expected.isnan())
    ratios = (got[wrong].double() / expected[wrong].double()).unique()
    if by_ratio and len(ratios) == 1 and bool(ratios.isfinite()) and abs(float(ratios[0]) - 1) > 1e-6:
        share = "" if bool(wrong.all()) else f" at {int(wrong.sum())} of {wrong.numel()} elements"
        return f"{float(ratios[0]):.6g} times the expected value{share}"
    first = tuple(wrong.nonzero()[0].tolist())
    at = f" at {list(first)}" if first else ""
    numbers = [tensor[first].item() for tensor in (got, expected)]
    values = [f"{number:.9g}" for number in numbers]
    if values[0] == values[1]:
        values = list(map(str, numbers))
    return f"{int(wrong.sum())} of {wrong.numel()} elements differ; got {values[0]}{at}, expected {values[1]}"


def gradients_of_rank(
    net: Net, program: Program, number: int, rank: int, world_size: int
) -> dict[str, Tensor | None]:
    """Return the gradients that a rank has alone in a step, by name."""
    loss = loss_of(net, program, number, rank, world_size)
    trainable = {name: one for name, one in net.named_parameters() if one.requires_grad}
    found = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True)
    return dict.fromkeys(name for name, _ in net.named_parameters()) | dict(zip(trainable, found, strict=True))


def _zeroed(gradient: Tensor | None, zero: str, index: int) -> Tensor | None:
    if gradient is None or zero == "none" or (zero == "alternate" and index % 2):
        return None
    return torch.zeros_like(gradient) if zero in ("zeros", "restrided") else gradient  # their order is not compared


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
