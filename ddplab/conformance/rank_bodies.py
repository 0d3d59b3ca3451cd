"""Bodies of checks that run on every rank; importable functions, because a rank's process must find them.

A body that compares returns what is wrong, and an empty text if nothing is.
"""

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .class_under_test import Subject
from .local_training import describe_difference
from .training_programs import Net, Program, Seen, look, loss_of

METHODS = ("no_sync", "register_comm_hook", "join")


def methods_of(_rank: int, _world_size: int, subject: Subject) -> list[str]:
    """Return which of `METHODS` a wrapped module has."""
    wrapped = subject.wrap(nn.Linear(2, 1))
    return [name for name in METHODS if callable(getattr(wrapped, name, None))]


def after_construction(
    rank: int, _world_size: int, subject: Subject, program: Program
) -> tuple[Seen, dict[str, Tensor]]:
    """Return what a rank has after construction, and its parameters before; buffers differ from rank to rank."""
    net = Net(program, rank)
    for buffer in net.buffers():
        buffer.add_(rank)
    own = {name: one.detach().clone() for name, one in net.named_parameters()}
    return look(net, subject.wrap(net)), own


# Real models: equal up to the rounding of the average


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


class _Precisions(nn.Module):
    """Layers of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float64)
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(next(layer.parameters()).dtype)).tanh()
        return x


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 3, 2), nn.GroupNorm(1, 3), nn.ReLU(), nn.Conv2d(3, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.reshape(-1, 1, 3, 2).repeat(1, 1, 1, 2))  # type: ignore[no-any-return]


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.reshape(-1, 3, 2))[0])  # type: ignore[no-any-return]


class _Bag(nn.Module):
    """A bag of embeddings with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(7, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bag(x.abs().mul(3).long() % 7))  # type: ignore[no-any-return]


class _Words(nn.Module):
    """An embedding whose weights also compute the output, as in language models."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, sparse=sparse)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        if not sparse:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.embedding(x.abs().mul(3).long() % 7)).tanh())  # type: ignore[no-any-return]


REAL_MODELS: dict[str, Callable[[], nn.Module]] = {
    "multi-layer perceptron": _mlp,
    "layers of three dtypes": _Precisions,
    "convolutions": _Convolutions,
    "recurrent network": _Recurrent,
    "language model with tied weights": _Words,
}
"""Models with real-valued weights that take inputs of shape [rows, 6]."""
SPARSE_MODELS: dict[str, Callable[[], nn.Module]] = {
    "sparse embedding": partial(_Words, sparse=True),
    "bag of sparse embeddings": _Bag,
}
MODELS: dict[str, Callable[[], nn.Module]] = REAL_MODELS | SPARSE_MODELS
STEPS = 3


def batch(step: int, rank: int) -> Tensor:
    """Return what a rank trains on in a step; shape [4, 6]."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def build(model: str, seed: int) -> nn.Module:
    """Build one of `MODELS` with random weights."""
    torch.manual_seed(seed)
    return MODELS[model]()


def compare_real(rank: int, world_size: int, subject: Subject, model: str, options: dict[str, Any]) -> str:
    """Train a real model; compare each average with those of the ranks' own gradients at the same parameters.

    Only the average rounds: each of its additions and divisions by at most one unit of the sum of absolute values.
    """
    module = build(model, seed=rank)
    wrapped = subject.wrap(module, bucket_cap_mb=1e-4, **options)
    dense = not any(getattr(part, "sparse", False) for part in module.modules())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9 if dense else 0)
    twin = build(model, seed=0)
    problem = ""  # returned after the next exchange, because the other ranks go on
    for step in range(STEPS):
        twin.load_state_dict(module.state_dict())
        local = [gradients_of(twin, batch(step, one)) for one in range(world_size)]
        optimizer.zero_grad()
        wrapped(batch(step, rank)).square().mean().backward()
        subject.finish(wrapped, optimizer)
        for name, parameter in module.named_parameters():
            parts = torch.stack([of_rank[name].double() for of_rank in local])
            if not problem and (wrong := outside(parameter.grad, parts, parameter.dtype)):
                problem = f"iteration {step}, rank {rank}: gradient of {name!r}: {wrong}"
        before = [parameter.detach().clone() for parameter in module.parameters()]
        optimizer.step()
        if not problem and all(map(torch.equal, before, module.parameters())):
            problem = f"iteration {step}, rank {rank}: the optimiser changed nothing"
        digest = torch.cat([parameter.detach().flatten().double() for parameter in module.parameters()])
        others = [torch.empty_like(digest) for _ in range(world_size)]
        dist.all_gather(others, digest)
        if not all(torch.equal(one, digest) for one in others):
            return problem or f"iteration {step}: parameters differ between the ranks"
    return problem


def gradients_of(module: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a batch on this rank alone, by name; those that are None are left out."""
    module.zero_grad()
    module(batch).square().mean().backward()
    return {name: one.grad.to_dense() for name, one in module.named_parameters() if one.grad is not None}


def outside(got: Tensor | None, parts: Tensor, dtype: torch.dtype) -> str:
    """Say how a gradient differs from the average of these parts by more than the average may round."""
    if got is None:
        return "got None, expected a tensor"
    got = got.to_dense().double()
    expected = parts.mean(dim=0)
    bound = (len(parts) + 2) * torch.finfo(dtype).eps * parts.abs().sum(dim=0)
    if bool(((got - expected).abs() <= bound).all()):
        return ""
    ratio = (got.flatten() @ expected.flatten() / expected.square().sum()).item()
    if bool(((got - ratio * expected).abs() <= 10 * bound).all()):
        return f"{ratio:.4g} of the expected"
    return describe_difference(got, expected)


# Special values


def compare_special_values(rank: int, world_size: int, subject: Subject) -> str:
    """Average gradients of which one is NaN and others are infinite, on one rank each."""
    module = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(3))
    factors = [torch.ones(4) for _ in range(world_size)]
    factors[0] = torch.tensor([float("nan"), float("inf"), 1.0, float("inf")])
    factors[-1] = torch.tensor([1.0, 1.0, 1.0, float("-inf")])

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = module

        def forward(self, factor: Tensor) -> Tensor:
            return torch.stack(
                [(self.weights[0] * factor).sum(), *(one.sum() for one in list(self.weights)[1:])]
            ).sum()

    wrapped = subject.wrap(Scaled(), bucket_cap_mb=1e-6)
    wrapped(factors[rank]).backward()
    subject.finish(wrapped, torch.optim.SGD(module.parameters(), lr=0.1))
    wanted = [torch.stack(factors).mean(dim=0), torch.ones(4), torch.ones(4)]
    for index, (parameter, want) in enumerate(zip(module, wanted, strict=True)):
        if not close(parameter.grad, want):
            return f"rank {rank}: gradient {index}: {describe_difference(parameter.grad, want)}"
    return ""


def compare_large_values(rank: int, world_size: int, subject: Subject) -> str:
    """Average half-precision gradients whose sum over the ranks overflows, while the average does not."""
    weights = nn.ParameterList(nn.Parameter(torch.ones(4, dtype=torch.float16)) for _ in range(3))

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = weights

        def forward(self, factor: Tensor) -> Tensor:
            return torch.stack([(one * factor).sum(dtype=torch.float32) for one in self.weights]).sum()

    factors = [torch.full((4,), 40_000.0 - 64 * one, dtype=torch.float16) for one in range(world_size)]
    for cap_mb in (1e-6, 25.0):
        wrapped = subject.wrap(Scaled(), bucket_cap_mb=cap_mb)
        for step in range(2):
            weights.zero_grad()
            wrapped(factors[rank]).backward()
            subject.finish(wrapped, torch.optim.SGD(weights.parameters(), lr=0.1))
            for index, parameter in enumerate(weights):
                if problem := outside(parameter.grad, torch.stack(factors).double(), torch.float16):
                    return (
                        f"iteration {step}, rank {rank}: half-precision gradient {index}, "
                        f"{factors[rank][0]:g} on this rank: {problem}"
                    )
    return ""


def subclassed_parameters(rank: int, world_size: int, subject: Subject) -> str:
    """Train parameters that are instances of a subclass of Tensor."""
    module, twin = (build("multi-layer perceptron", seed) for seed in (rank, 0))
    for one in (module, twin):
        for layer in (part for part in one.modules() if isinstance(part, nn.Linear)):
            layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Subclass))
    wrapped = subject.wrap(module, bucket_cap_mb=1e-4)
    for step in range(STEPS):
        local = [gradients_of(twin, batch(step, one)) for one in range(world_size)]
        module.zero_grad()
        wrapped(batch(step, rank)).square().mean().backward()
        subject.finish(wrapped, torch.optim.SGD(module.parameters(), lr=0.1))
        for name, parameter in module.named_parameters():
            parts = torch.stack([of_rank[name].as_subclass(Tensor).double() for of_rank in local])
            got = None if parameter.grad is None else parameter.grad.as_subclass(Tensor)
            if problem := outside(got, parts, parameter.dtype):
                return f"parameters of a subclass of Tensor, iteration {step}, rank {rank}: {name!r}: {problem}"
    return ""


class Subclass(Tensor):
    """A tensor of a class of its own, as libraries make them."""


def close(got: Tensor | None, want: Tensor | None) -> bool:
    """Whether a gradient is another one up to rounding, with NaN and infinities at the same places."""
    if got is None or want is None:
        return got is want
    return torch.allclose(got, want, rtol=1e-6, atol=0, equal_nan=True)


# Faults

FAULTS = ("forward", "between buckets", "after backward")
"""Where a rank dies."""


def train_until(rank: int, world_size: int, subject: Subject, where: str, kind: str) -> None:
    """Train; in the second iteration the last rank is killed, or raises an error in its backward pass."""
    layers = [nn.Linear(6, 6) for _ in range(6)]
    module = nn.Sequential(*layers)
    wrapped = subject.wrap(module, bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(4):
        is_time = step == 1 and rank == world_size - 1
        if is_time and where == "forward":
            fail(kind)
        output = wrapped(batch(step, rank))
        hooked = (
            layers[3].weight.register_hook(lambda _: fail(kind)) if is_time and where == "between buckets" else None
        )
        output.square().mean().backward()
        subject.finish(wrapped, optimizer)
        if hooked is not None:
            hooked.remove()
        if is_time and where == "after backward":
            fail(kind)
        optimizer.step()


def fail(kind: str) -> None:
    """Kill this process, or raise an error."""
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ArithmeticError("this rank fails on purpose")


def run_script(rank: int, world_size: int, subject: Subject, program: Program) -> tuple[list[Seen], str]:
    """Run a program on a rank; returns what it saw, and the kind of the error that ended it."""
    from .training_programs import optimizer_of, run_step

    net = Net(program, rank)
    seen: list[Seen] = []
    try:
        wrapped = subject.wrap(net, **program.options)
        optimizer = optimizer_of(program, net)
        for number in range(len(program.steps)):
            run_step(subject, wrapped, optimizer, program, number, rank, world_size)
            seen.append(look(net, wrapped))
    except (RuntimeError, ValueError, TypeError) as error:
        return seen, type(error).__name__
    return seen, ""


def layout_of(
    rank: int, world_size: int, subject: Subject, sizes: tuple[int, ...], options: dict[str, Any], steps: int
) -> tuple[tuple[int, ...], ...] | None:
    """Return the buckets after some iterations of a model whose gradients become ready in reverse order."""
    from .class_under_test import buckets_of
    from .training_programs import Step, Weight

    every = tuple(range(len(sizes)))
    step = Step("train", (every,) * world_size, (1,) * world_size)
    program = Program(tuple(Weight((size,)) for size in sizes), (step,) * steps, options)
    net = Net(program)
    wrapped = subject.wrap(net, **options)
    for number in range(steps):
        torch.autograd.backward(loss_of(wrapped, program, number, rank, world_size))
        subject.finish(wrapped, torch.optim.SGD(net.parameters(), lr=0.1))
    return buckets_of(wrapped)
