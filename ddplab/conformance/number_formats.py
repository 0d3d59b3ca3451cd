"""Number formats: NaN and infinity, averages in half precision, and mixed precision."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .check_runner import Bench, report
from .class_under_test import NotSupportedError, Subject
from .local_training import close, describe_difference
from .real_models import batch, local_gradients, mlp, outside

PRECISIONS = ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32), (torch.float32, torch.float16))
"""Dtypes of computation and of all-reduces."""


class _ScaledWeights(nn.Module):
    """Three weights; the gradient of each is a factor that the caller gives."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(4, dtype=dtype)) for _ in range(3))

    def forward(self, factors: Sequence[Tensor]) -> Tensor:
        scaled = [one * factor for one, factor in zip(self.weights, factors, strict=True)]
        return torch.stack([one.sum(dtype=torch.float32) for one in scaled]).sum()


def compare_special_values(rank: int, world_size: int, subject: Subject) -> str:
    """Average gradients of which one is NaN and others are infinite, on one rank each."""
    module = _ScaledWeights(torch.float32)
    factors = [torch.ones(4) for _ in range(world_size)]
    factors[0] = torch.tensor([float("nan"), float("inf"), 1.0, float("inf")])
    factors[-1] = torch.tensor([1.0, 1.0, 1.0, float("-inf")])
    wrapped = subject.wrap(module, bucket_cap_mb=1e-6)
    wrapped([factors[rank], torch.ones(4), torch.ones(4)]).backward()
    subject.finish(wrapped, torch.optim.SGD(module.parameters(), lr=0.1))
    wanted = [torch.stack(factors).mean(dim=0), torch.ones(4), torch.ones(4)]
    for index, (parameter, want) in enumerate(zip(module.weights, wanted, strict=True)):
        if not close(parameter.grad, want):
            return f"rank {rank}: gradient {index}: {describe_difference(parameter.grad, want)}"
    return ""


def compare_large_values(rank: int, world_size: int, subject: Subject) -> str:
    """Average half-precision gradients whose sum over the ranks overflows, while the average does not."""
    module = _ScaledWeights(torch.float16)
    factors = [torch.full((4,), 40_000.0 - 64 * one, dtype=torch.float16) for one in range(world_size)]
    for cap_mb in (1e-6, 25.0):
        wrapped = subject.wrap(module, bucket_cap_mb=cap_mb)
        for step in range(2):
            module.zero_grad()
            wrapped([factors[rank]] * 3).backward()
            subject.finish(wrapped, torch.optim.SGD(module.parameters(), lr=0.1))
            for index, parameter in enumerate(module.weights):
                if problem := outside(parameter.grad, torch.stack(factors).double(), torch.float16):
                    return (
                        f"iteration {step}, rank {rank}: half-precision gradient {index}, "
                        f"{factors[rank][0]:g} on this rank: {problem}"
                    )
    return ""


def in_mixed_precision(rank: int, world_size: int, subject: Subject, low: torch.dtype, reduce: torch.dtype) -> str:
    """Compute in one dtype and reduce in another; parameters and gradients keep theirs."""
    from torch.nn.parallel.distributed import _MixedPrecision

    module = mlp(seed=rank)
    config = _MixedPrecision(param_dtype=low, reduce_dtype=reduce)
    wrapped = subject.wrap(module, bucket_cap_mb=1e-4, mixed_precision=config)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def loss(module: nn.Module, step: int, rank: int) -> Tensor:
        return module(batch(step, rank).to(low)).square().mean()  # type: ignore[no-any-return]

    for step in range(4):
        twin = mlp(seed=0)
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


def check_special_values(bench: Bench) -> None:
    """NaN and infinity come out as from a local average, and averages that can be represented do not overflow."""
    report(bench.run(compare_special_values, bench.subject))
    report(bench.run(compare_large_values, bench.subject))


def check_mixed_precision(bench: Bench) -> None:
    """Forward and backward in one dtype, all-reduces in another; a class may refuse with an error."""
    bench.needs("mixed_precision")
    for low, reduce in PRECISIONS:
        if refusal := bench.averages_or_raises(in_mixed_precision, low, reduce):
            raise NotSupportedError(f"it refuses it: {refusal}")
