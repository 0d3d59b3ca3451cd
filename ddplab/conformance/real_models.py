"""Real models: small ones with real-valued weights, whose gradients equal the average up to its rounding.

A body that compares returns what is wrong, and an empty text if nothing is.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .class_under_test import Subject
from .local_training import describe_difference


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
    "multi-layer perceptron": lambda: nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    ),
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


Loss = Callable[[nn.Module, int, int], Tensor]
"""Runs forward for a step and the batch of a rank; returns the loss."""


def batch(step: int, rank: int) -> Tensor:
    """Return what a rank trains on in a step; shape [4, 6]."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def build(model: str, seed: int) -> nn.Module:
    """Build one of `MODELS` with random weights."""
    torch.manual_seed(seed)
    return MODELS[model]()


def mlp(seed: int) -> nn.Module:
    """Build a multi-layer perceptron."""
    return build("multi-layer perceptron", seed)


def square(module: nn.Module, step: int, rank: int) -> Tensor:
    """Return the mean square of a module's output; see `Loss`."""
    return module(batch(step, rank)).square().mean()  # type: ignore[no-any-return]


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


def compare_real(rank: int, world_size: int, subject: Subject, model: str) -> str:
    """Train a real model; compare each average with those of the ranks' own gradients at the same parameters.

    Only the average rounds: each of its additions and divisions by at most one unit of the sum of absolute values.
    """
    module, twin = (build(model, seed) for seed in (rank, 0))
    wrapped = subject.wrap(module, bucket_cap_mb=1e-4)
    dense = not any(getattr(part, "sparse", False) for part in module.modules())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9 if dense else 0)
    problem = ""  # returned after the next exchange, because the other ranks go on
    for step in range(STEPS):
        twin.load_state_dict(module.state_dict())
        local = local_gradients(twin, square, step, range(world_size))
        optimizer.zero_grad()
        square(wrapped, step, rank).backward()
        subject.finish(wrapped, optimizer)
        if not problem and (wrong := difference(module, local)):
            problem = f"iteration {step}, rank {rank}: {wrong}"
        before = [parameter.detach().clone() for parameter in module.parameters()]
        optimizer.step()
        if not problem and all(map(torch.equal, before, module.parameters())):
            problem = f"iteration {step}, rank {rank}: the optimiser changed nothing"
        if differing_ranks(module.parameters(), 0, world_size):
            return problem or f"iteration {step}: parameters differ between the ranks"
    return problem


def differing_ranks(tensors: Iterable[Tensor], like: int, world_size: int) -> list[int]:
    """Return the ranks on which these tensors are not those of the rank `like`; call on every rank."""
    digest = torch.cat([one.detach().flatten().double() for one in tensors])
    every = [torch.empty_like(digest) for _ in range(world_size)]
    dist.all_gather(every, digest)
    return [rank for rank, one in enumerate(every) if not torch.equal(one, every[like])]


def subclassed_parameters(_rank: int, world_size: int, subject: Subject) -> str:
    """Train parameters that are instances of a subclass of Tensor."""

    def make(seed: int) -> nn.Module:
        module = mlp(seed)
        for layer in (part for part in module.modules() if isinstance(part, nn.Linear)):
            layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Subclass))
        return module

    problem = train(subject, make, square, range(world_size), STEPS)
    return problem and f"parameters of a subclass of Tensor, {problem}"


class Subclass(Tensor):
    """A tensor of a class of its own, as libraries make them."""
