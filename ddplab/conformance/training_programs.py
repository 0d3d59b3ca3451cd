"""Programs: training scripts as data, which run under a data-parallel class on ranks and on a single process.

The models compute with integers. Their gradients are multiples of a power of the world size, so that averages over
the ranks are exact whatever the order of the summation, and "equal" can mean equal.
"""

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..reference.launch import rank_device
from ..reference.recording.logging_data import buckets_of
from .class_under_test import Subject

StepKind = Literal["train", "accumulate", "evaluate", "forward", "change_lr"]
"""A pass with averaging, one under `no_sync`, one in evaluation mode, a forward pass without a backward pass, or a
change of the learning rate."""
Zero = Literal["none", "zeros", "restrided", "keep", "alternate"]
"""Before a pass, gradients are set to None, to zeros, to zeros in another order of memory, or kept, all or half."""
Layout = Literal["contiguous", "transposed", "channels last"]
"""Order of a tensor in memory: the last two dimensions swapped, or a 4-dimensional one's channels last."""
MOST_PASSES = 6
"""Largest number of passes with averaging in a program; their gradients can be divided so often without rounding."""
BUFFER_OPTIONS = ("forward_sync_buffers", "broadcast_buffers")
"""Options of torch's class that turn the broadcast of buffers off."""
ROWS = 3
"""Largest number of samples of a batch."""


@dataclass(frozen=True)
class Weight:
    """A parameter of a program's model, with `depth` modules around it.

    `tied_to` is the index of an earlier weight that is the same parameter; None: it is a parameter of its own.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    depth: int = 0
    frozen: bool = False
    tied_to: int | None = None
    layout: Layout = "contiguous"


@dataclass(frozen=True)
class ProgramStep:
    """One step of a program."""

    kind: StepKind
    used: tuple[tuple[int, ...], ...]
    """By rank, the weights that forward uses, in this order; gradients become ready in reverse order."""
    rows: tuple[int, ...]  #: by rank, the number of samples
    zero: Zero = "none"
    """What happens to the gradients before its forward pass; in every other step, before its backward pass."""
    optimize: bool = True  #: whether the optimiser steps after it
    evaluation: bool = False  #: whether the module is in evaluation mode, as for fine-tuning with frozen statistics


@dataclass(frozen=True)
class Program:
    """A training script: a model, arguments for the data-parallel class, and what is done, one step after the other.

    SGD has momentum. With `buffer`, the model counts samples in buffers, which the class broadcasts from rank 0.
    """

    weights: tuple[Weight, ...]
    steps: tuple[ProgramStep, ...]
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: Literal["sgd", "adam"] = "sgd"
    buffer: bool = False
    seed: int = 0


PLAIN = (Weight((2, 3)), Weight((4,), depth=2), Weight((5,)), Weight((3, 2)))
SPECIAL = (
    Weight((3,)),
    Weight((2,), dtype="float64", depth=1),
    Weight((), frozen=True),
    Weight((3,), tied_to=0),
    Weight((0,)),
    Weight(()),
    Weight((2, 2), dtype="float64"),
    Weight((3, 4), layout="transposed"),
    Weight((2, 3, 2, 2), layout="channels last"),
)
"""Parameters of which each has something unusual."""


def program_of(
    weights: Sequence[Weight],
    kinds: Sequence[StepKind],
    world_size: int,
    *,
    used: Callable[[int, int], Sequence[int]] | None = None,
    zeros: Sequence[Zero] | None = None,
    **further: Any,
) -> Program:
    """Make a program; `further` are other fields of it.

    `used` returns what a step uses on a rank; None: everything, in an order that differs from rank to rank. `zeros`
    is what happens to the gradients before each step; None: they are set to None.
    """

    def rotated(_step: int, rank: int) -> Sequence[int]:
        first = rank % len(weights)
        return [*range(first, len(weights)), *range(first)]

    steps = []
    for number, kind in enumerate(kinds):
        of_ranks = tuple(tuple((used or rotated)(number, rank)) for rank in range(world_size))
        rows = tuple(1 + (rank + number) % 3 for rank in range(world_size))
        steps.append(ProgramStep(kind, of_ranks, rows, zeros[number] if zeros else "none"))
    return Program(tuple(weights), tuple(steps), **further)


def in_one_order(program: Program) -> Program:
    """Return a program in which all ranks use the weights as the first one does."""
    return replace(program, steps=tuple(replace(step, used=step.used[:1] * len(step.used)) for step in program.steps))


def in_whole_steps(program: Program) -> Program:
    """Return a program for an adapter: SGD steps after each averaged pass, always at one learning rate."""
    steps, accumulated = list[ProgramStep](), False
    for step in program.steps:
        if step.kind != "change_lr":
            steps.append(replace(step, zero="keep" if accumulated else "none", optimize=True))
            accumulated = step.kind == "accumulate" or (accumulated and step.kind != "train")
    return replace(program, steps=tuple(steps), optimizer="sgd")


def _without(
    weight: Callable[[Weight], dict[str, Any]] = lambda _: {},
    step: Callable[[ProgramStep], dict[str, Any]] = lambda _: {},
) -> Callable[[Program], Program]:
    """Return a function that changes these fields of each weight and of each step."""
    return lambda program: replace(
        program,
        weights=tuple(replace(one, **weight(one)) for one in program.weights),
        steps=tuple(replace(one, **step(one)) for one in program.steps),
    )


def _using_all(program: Program) -> Program:
    every = range(len(program.weights))
    return _without(step=lambda one: {"used": tuple((*used, *(set(every) - {*used})) for used in one.used)})(program)


UNUSUAL: dict[str, Callable[[Program], Program]] = {
    "float64 parameters": _without(lambda _: {"dtype": "float32"}),
    "an order in memory that is not contiguous": _without(lambda _: {"layout": "contiguous"}),
    "scalar parameters": _without(lambda one: {"shape": one.shape or (1,)}),
    "frozen parameters": _without(lambda _: {"frozen": False}),
    "tied parameters": _without(lambda _: {"tied_to": None}),
    "empty parameters": _without(lambda one: {"shape": one.shape if all(one.shape) else (1,)}),
    "kept gradients": _without(step=lambda one: {"zero": "none"} if one.zero in ("keep", "alternate") else {}),
    "gradients set to zeros": _without(
        step=lambda one: {"zero": "none"} if one.zero in ("zeros", "restrided") else {}
    ),
    "ready orders that differ between ranks": in_one_order,
    "ready orders that change": lambda program: _without(step=lambda _: {"used": program.steps[0].used})(program),
    "parameters left out": _using_all,
    "passes under no_sync": lambda program: replace(
        program, steps=tuple(one for one in program.steps if one.kind != "accumulate")
    ),
    "evaluation": lambda program: replace(
        program, steps=tuple(replace(one, evaluation=False) for one in program.steps if one.kind != "evaluate")
    ),
}
"""What a program may have that a plain one has not, each with a function that returns the program without it."""


def unusual(program: Program) -> list[str]:
    """Return what of `UNUSUAL` a program has; of the smallest one with a fault, what the fault needs."""
    return [name for name, without in UNUSUAL.items() if without(program) != program]


def of_usual_weights(program: Program) -> Program:
    """Return a program without what an adapter may refuse: evaluation, tied and rare parameters."""
    refused = ("float64 parameters", "scalar parameters", "tied parameters", "empty parameters")
    for name in (*refused, "an order in memory that is not contiguous", "evaluation"):
        program = UNUSUAL[name](program)
    return program


def arranged(values: Tensor, layout: Layout) -> Tensor:
    """Return a tensor of the same values in another order of memory, or as it is if its shape has no such order."""
    if layout == "transposed" and values.dim() > 1 and min(values.shape[-2:]) > 1:
        return values.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "channels last" and values.dim() == 4:
        return values.contiguous(memory_format=torch.channels_last)
    return values.contiguous()


REPLACED = "samples"
"""The buffer that each forward pass replaces by a new tensor; it writes into the others."""


def buffer_values(samples: int) -> dict[str, Tensor]:
    """Return what a model's buffers hold after so many samples, by name; floats would round some of the numbers."""
    table = torch.arange(6).reshape(2, 3) + samples
    counted = {"samples": torch.tensor(samples), "transposed": table, "large": table + 2**62}
    return counted | {"fine": table.double() + 2**-40}


class Net(nn.Module):
    """The model of a program: `h = abs(h + x[:, i] * sum(weight_i * constant_i))`, weight after weight.

    Signs depend on the weights, so a gradient of stale weights is wrong, and no gradient dies out. Other ranks than 0
    start from NaN, as in memory that is not initialised; construction must make the weights equal.
    """

    def __init__(self, program: Program, rank: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(program.seed)
        self.names: list[str] = []
        if program.buffer:
            for name, values in buffer_values(0).items():
                layout: Layout = "transposed" if name == "transposed" else "contiguous"
                self.register_buffer(name, arranged(values, layout), persistent=name != "fine")
        for index, weight in enumerate(program.weights):
            dtype = getattr(torch, weight.dtype)
            values = torch.randint(-2, 3, weight.shape, generator=generator).to(dtype)
            values += 2**-30 * (dtype == torch.float64)  # a digit that float32 lacks
            constant = torch.randint(1, 3, weight.shape, generator=generator).to(dtype)
            constant += 2**-20 * (dtype == torch.float64)  # and gradients in double precision have one, too
            values += torch.nan if rank else 0
            parameter = nn.Parameter(arranged(values, weight.layout), requires_grad=not weight.frozen)
            if weight.tied_to is not None:
                parameter = self.weight(weight.tied_to)
            owner: nn.Module = self
            path = [f"block{index}", *["block"] * weight.depth][: weight.depth]
            for name in path:
                owner.add_module(name, nn.Module())
                owner = owner.get_submodule(name)
            owner.register_parameter(f"w{index}", parameter)
            self.names.append(".".join([*path, f"w{index}"]))
            setattr(self, f"constant{index}", constant)

    def weight(self, index: int) -> nn.Parameter:
        """The parameter of a weight."""
        return self.get_parameter(self.names[index])

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        """Return one value for each row of `x`; shape [rows]."""
        if self.training:
            for name, buffer in self.named_buffers():
                if name == REPLACED:
                    setattr(self, name, buffer + len(x))
                else:
                    buffer.add_(len(x))
        h: Tensor = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        for index in used:
            constant: Tensor = getattr(self, f"constant{index}").to(x.device)
            h = torch.abs(h + x[:, index] * (self.weight(index) * constant).sum().double())
        return h


def loss_of(module: nn.Module, program: Program, number: int, rank: int, world_size: int) -> Tensor:
    """Run the forward pass of a step on a rank; the loss makes gradients whose averages are exact."""
    step = program.steps[number]
    generator = torch.Generator().manual_seed(1_000_003 * program.seed + 1_009 * number + rank)
    x = torch.randint(1, 4, (step.rows[rank], len(program.weights)), generator=generator, dtype=torch.float64)
    output: Tensor = module(x.to(next(module.parameters()).device), step.used[rank])
    return output.sum().mul(world_size**MOST_PASSES)


def optimizer_of(program: Program, module: nn.Module) -> torch.optim.Optimizer:
    """Make the optimiser. Its steps are large, so that a wrong gradient shows in the parameters."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if program.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=0.5)
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.5)


def zero_gradients(module: nn.Module, zero: Zero) -> None:
    """Set gradients to None or to zeros, or keep them."""
    for index, parameter in enumerate(module.parameters()):
        if zero == "none" or (zero == "alternate" and index % 2):
            parameter.grad = None
        elif zero in ("zeros", "restrided") and parameter.grad is not None:
            zeros = torch.zeros_like(parameter.grad)
            is_transposed = parameter.dim() > 1 and not parameter.is_contiguous()
            other: Layout = "contiguous" if is_transposed else "transposed"
            parameter.grad = arranged(zeros, other) if zero == "restrided" else zeros


class Seen(NamedTuple):
    """What a rank saw after a step: tensors by name, and parameter indices by bucket, None if not reported.

    `largest` has, in what a rank must see, the largest gradient of a rank so far, by name.
    """

    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    buckets: tuple[tuple[int, ...], ...] | None
    largest: dict[str, float] = {}  # noqa: RUF012 - never changed


class Script:
    """A program that runs on a rank under the data-parallel class; steps may be added to it while it runs."""

    def __init__(
        self, subject: Subject, program: Program, rank: int, world_size: int, net: Net | None = None
    ) -> None:
        self.subject, self.program, self.rank, self.world_size = subject, program, rank, world_size
        self.net = net or Net(program, 0 if subject.is_adapter else rank).to(rank_device())
        prepared = subject.prepare(self.net, partial(optimizer_of, program), **program.options)
        self.wrapped, self.optimizer, self.update = prepared

    def run(self, number: int) -> Seen:
        """Run one step; returns what the rank has after it."""
        step, wrapped = self.program.steps[number], self.wrapped
        if step.kind == "change_lr":
            halve_learning_rate(self.optimizer)
        elif step.kind == "evaluate":
            wrapped.eval()
            if self.net.training:
                raise RuntimeError("eval() of the wrapped module does not reach the module")
            with torch.no_grad() if number % 2 else torch.inference_mode():
                self._loss(number)
        else:
            zero = "keep" if self.subject.is_adapter else step.zero  # after its step, it clears them by itself
            if number % 2 == 0:
                zero_gradients(wrapped, zero)
            wrapped.train(not step.evaluation or step.kind == "forward")
            averaging = wrapped.no_sync() if step.kind == "accumulate" else nullcontext()
            with averaging, warnings.catch_warnings():
                if step.zero == "restrided":
                    warnings.filterwarnings("ignore", message="(?s).*strides")  # autograd warns that this is slow
                loss = self._loss(number)
                if number % 2:
                    zero_gradients(wrapped, zero)
                if step.kind != "forward":
                    torch.autograd.backward(loss)
            if step.kind == "train":
                self.subject.finish(wrapped, self.optimizer)
                if step.optimize:
                    self.update()
                if self.subject.is_adapter:
                    wrapped.zero_grad()
        wrapped.train()
        return look(self.net, wrapped, gradients=not self.subject.is_adapter)

    def run_all(self) -> Iterator[Seen]:
        """Run all steps, one after the other."""
        return map(self.run, range(len(self.program.steps)))

    def _loss(self, number: int) -> Tensor:
        return loss_of(self.wrapped, self.program, number, self.rank, self.world_size)


def halve_learning_rate(*optimizers: Any) -> None:
    """Halve learning rates: what a step `change_lr` does. Optimisers may share parameter groups, or have none."""
    for group in {id(group): group for one in optimizers for group in getattr(one, "param_groups", ())}.values():
        group["lr"] *= 0.5


def run_on_rank(rank: int, world_size: int, subject: Subject, program: Program) -> list[Seen]:
    """Run a program under the data-parallel class; returns what the rank saw after each step."""
    return list(Script(subject, program, rank, world_size).run_all())


def run_until_error(rank: int, world_size: int, subject: Subject, program: Program) -> tuple[list[Seen], str]:
    """Run a program on a rank; returns what the rank saw, and the kind of the error that ended it."""
    seen: list[Seen] = []
    try:
        seen.extend(Script(subject, program, rank, world_size).run_all())
    except (RuntimeError, ValueError, TypeError) as error:
        return seen, type(error).__name__
    return seen, ""


def around_construction(
    rank: int, world_size: int, subject: Subject, program: Program
) -> tuple[Seen, Seen, list[float]]:
    """Return what a rank has before and after construction, and random numbers drawn after it; seeds differ."""
    net = Net(program, 0 if subject.is_adapter else rank).to(rank_device())
    for buffer in net.buffers():
        buffer.add_(rank)
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    before, (wrapped, *_) = look(net, net), subject.prepare(net, lambda _: optimizer_of(program, net))
    after = look(net, wrapped)
    loss_of(wrapped, program, 0, rank, world_size)
    return before, after, [torch.rand(()).item(), random.random(), np.random.random()]


def look(net: nn.Module, wrapped: nn.Module, *, gradients: bool = True) -> Seen:
    """Copy what a rank has, to the CPU."""
    named = dict(net.named_parameters())
    kept = {name: one.grad for name, one in named.items()} if gradients else {}
    return Seen(
        {name: None if one is None else on_cpu(one.detach().to_dense()) for name, one in kept.items()},
        {name: on_cpu(whole(one)) for name, one in named.items()},
        {name: on_cpu(buffer) for name, buffer in net.named_buffers()},
        buckets_of(wrapped),
    )


def whole(tensor: Any) -> Tensor:
    """Return the values of a tensor; of one that is sharded, all of them: call on every rank."""
    return tensor.full_tensor().detach() if hasattr(tensor, "full_tensor") else tensor.detach()  # type: ignore[no-any-return]


def on_cpu(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU."""
    return tensor.to("cpu", copy=True)
