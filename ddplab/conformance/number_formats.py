"""Number formats: NaN and infinity, averages in half precision, and mixed precision."""

import logging
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from .check_runner import Bench
from .class_under_test import NotSupportedError, Subject
from .local_training import describe_difference, same
from .real_models import Training, batch, outside

PRECISIONS = ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32), (torch.float32, torch.float16))
"""Dtypes of computation and of all-reduces."""


class _ScaledWeights(nn.Module):
    """Three weights; the gradient of each is a factor that the caller gives."""

    def __init__(self, dtype: torch.dtype, elements: int = 4) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(elements, dtype=dtype)) for _ in range(3))

    def forward(self, factors: Sequence[Tensor]) -> Tensor:
        scaled = [one * factor for one, factor in zip(self.weights, factors, strict=True)]
        return torch.stack([one.sum(dtype=torch.float32) for one in scaled]).sum()


def compare_special_values(rank: int, world_size: int, subject: Subject) -> str:
    """Average gradients of which one is NaN and others are infinite, on one rank each."""
    factors = [torch.ones(4) for _ in range(world_size)]
    factors[0] = torch.tensor([float("nan"), float("inf"), 1.0, float("inf")])
    factors[-1] = torch.tensor([1.0, 1.0, 1.0, float("-inf")])
    training = Training(subject, partial(_ScaledWeights, torch.float32), bucket_cap_mb=1e-6)
    training.backward(lambda module, _, rank: module([factors[rank], torch.ones(4), torch.ones(4)]), 0)
    wanted = [torch.stack(factors).mean(dim=0), torch.ones(4), torch.ones(4)]
    for index, (parameter, want) in enumerate(zip(training.module.parameters(), wanted, strict=True)):
        if not same(parameter.grad, want, rtol=1e-6):
            return f"rank {rank}: gradient {index}: {describe_difference(parameter.grad, want)}"
    return ""


def compare_large_values(rank: int, world_size: int, subject: Subject) -> str:
    """Average half-precision gradients whose sum over the ranks overflows, while the average does not."""
    for cap_mb, elements in ((1e-6, 4), (25.0, 4), (25.0, 2**19)):
        factors = [torch.full((elements,), 40_000.0 - 64 * one, dtype=torch.float16) for one in range(world_size)]

        def run(module: nn.Module, _step: int, rank: int, factors: Sequence[Tensor] = factors) -> Tensor:
            return module([factors[rank]] * 3)  # type: ignore[no-any-return]

        training = Training(subject, partial(_ScaledWeights, torch.float16, elements), bucket_cap_mb=cap_mb)
        for step in range(2):
            training.backward(run, step)
            for index, parameter in enumerate(training.module.parameters()):
                if problem := outside(parameter.grad, torch.stack(factors).double(), torch.float16):
                    return (
                        f"iteration {step}, rank {rank}: half-precision gradient {index} of {elements} elements, "
                        f"{factors[rank][0]:g} on this rank: {problem}"
                    )
    return ""


def in_mixed_precision(_rank: int, _world_size: int, subject: Subject, low: torch.dtype, reduce: torch.dtype) -> str:
    """Compute in one dtype and reduce in another; parameters and gradients keep theirs."""
    from torch.nn.parallel import distributed

    distributed.logger.setLevel(logging.ERROR)  # torch's class warns that it has received the configuration
    training = Training(subject, mixed_precision=distributed._MixedPrecision(param_dtype=low, reduce_dtype=reduce))
    training.twin.to(low)

    def run(module: nn.Module, step: int, rank: int) -> Tensor:
        return module(batch(step, rank).to(low)).square().mean()  # type: ignore[no-any-return]

    for step in range(4):
        training.backward(run, step)
        where = f"computes in {low}, reduces in {reduce}"
        for name, parameter in training.module.named_parameters():
            if parameter.dtype != torch.float32 or parameter.grad is None or parameter.grad.dtype != torch.float32:
                at = f"iteration {step}, rank {training.rank}"
                return f"{where}, {at}: {name!r} or its gradient is not of torch.float32"
        if problem := training.wrong(run, step, dtype=reduce):
            return f"{where}, {problem}"
        training.optimizer.step()
    return ""


def check_special_values(bench: Bench) -> None:
    """NaN and infinity come out as from a local average, and averages that can be represented do not overflow."""
    bench.try_body(compare_special_values)
    bench.try_body(compare_large_values)


def check_mixed_precision(bench: Bench) -> None:
    """Forward and backward in one dtype, all-reduces in another; a class may refuse with an error."""
    bench.needs("mixed_precision")
    for low, reduce in PRECISIONS:
        if refusal := bench.averages_or_raises(in_mixed_precision, low, reduce):
            raise NotSupportedError(f"it refuses it: {refusal}")
