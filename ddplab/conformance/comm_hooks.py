"""Comm hooks: what a hook receives, what becomes of its result, and the hooks of `ddplab.reference.comm_hooks`."""

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..reference.comm_hooks import allreduce, compress, powersgd, quantization
from .check_runner import VIEWS, Bench
from .class_under_test import Subject
from .real_models import REAL_MODELS, STEPS, Assembled, Training, mean_square, mlp, outside
from .several_modules import group_of

# What a hook receives, and what becomes of its result


def averaging_hook(
    look: Callable[[Any, Any], None] | None = None, factor: float = 1, group: dist.ProcessGroup | None = None
) -> Any:
    """Return a comm hook that calls `look(state, bucket)`, averages, and multiplies by a factor in a new tensor."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - torch's class accepts no other
        # annotation than its own bucket's
        if look is not None:
            look(state, bucket)
        flat = bucket.buffer().div_(dist.get_world_size(group))
        future = dist.all_reduce(flat, group=group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0] if factor == 1 else done.value()[0] * factor)

    return hook


def compare_hook(_rank: int, world_size: int, subject: Subject, factor: float, options: dict[str, Any]) -> str:
    """Train with a comm hook that averages and multiplies by a factor, if that is not 1 in a tensor of its own."""
    training, other = Training(subject, REAL_MODELS["recurrent network"], **options), Training(subject, **options)
    seen: list[tuple[int, int, bool]] = []
    wrong: list[str] = []
    futures: list[weakref.ref[torch.futures.Future[Tensor]]] = []

    def look(state: Any, bucket: Any) -> None:
        state.append((bucket.index(), bucket.buffer().numel(), bucket.is_last()))
        wrong.extend(_wrong_gradients(bucket))

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - as of `averaging_hook`
        future = averaging_hook(look, factor)(state, bucket)
        futures.append(weakref.ref(future))
        return future

    training.wrapped.register_comm_hook(seen, hook)
    strayed: list[Any] = []  # buckets of the first module that the hook of the other one got
    other.wrapped.register_comm_hook(None, averaging_hook(lambda _, bucket: strayed.append(bucket), factor=0.25))
    elements = sum(parameter.numel() for parameter in training.module.parameters())
    for step in range(STEPS):
        seen.clear()
        training.backward(mean_square, step)
        described = f"hook that multiplies by {factor:g}"
        if problem := training.wrong(mean_square, step, divisor=world_size / factor):
            return f"{described}, {problem}{', because the hook of another module was called' if strayed else ''}"
        where = f"{described}, iteration {step}, rank {training.rank}"
        if wrong:
            return f"{where}: {wrong[0]}"
        if sum(size for _, size, _ in seen) != elements:
            return f"{where}: hooks got {sum(size for _, size, _ in seen)} of {elements} elements"
        if [index for index, _, _ in seen] != list(range(len(seen))):
            return f"{where}: expected the buckets in the order of their indices, got {seen}"
        if [is_last for _, _, is_last in seen] != [False] * (len(seen) - 1) + [True]:
            return f"{where}: expected the bucket launched last to be the last one, got {seen}"
    gc.collect()
    if (alive := sum(future() is not None for future in futures)) > 2 * len(seen):  # of the last two iterations
        return f"{described}, rank {training.rank}: {alive} futures of hooks live on, with their results' memory"
    return ""


def hides_errors(rank: int, _world_size: int, subject: Subject) -> str:
    """Train with a comm hook whose future holds an error on every rank; the script must get an error."""
    training, future = Training(subject), torch.futures.Future[Tensor]()
    future.set_exception(ArithmeticError("this hook fails on purpose"))  # type: ignore[arg-type]  # as documented
    training.wrapped.register_comm_hook(None, lambda state, bucket: future)  # noqa: ARG005 - torch's names
    with suppress(Exception):
        training.backward(mean_square, 0)
        return f"rank {rank}: the future of a comm hook holds an error, but the backward pass raised none"
    return ""


def _wrong_gradients(bucket: Any) -> list[str]:
    """Compare a bucket's gradients with its parameters and its buffer."""
    gradients, parameters = bucket.gradients(), bucket.parameters()
    shapes = [tuple(tensor.shape) for tensor in gradients], [tuple(tensor.shape) for tensor in parameters]
    if shapes[0] != shapes[1]:
        return [f"a bucket's gradients have the shapes {shapes[0]}, its parameters {shapes[1]}"]
    torch._foreach_neg_(gradients)  # a hook may write into them
    is_equal = torch.equal(torch.cat([gradient.flatten() for gradient in gradients]), bucket.buffer())
    torch._foreach_neg_(gradients)
    return [] if is_equal else ["a bucket's gradients are not the parts of its buffer"]


# Hooks that compress

Bound = Callable[[Tensor, float], Tensor]
"""Largest error of an average, from the gradients of all ranks and the largest range of a rank's gradients."""


def _rounding(dtype: torch.dtype) -> Bound:
    info = torch.finfo(dtype)
    return lambda parts, _range: 2 * info.eps * parts.abs().sum(dim=0) + info.tiny


def _one_level(_parts: Tensor, largest_range: float) -> Tensor:
    return torch.tensor(largest_range / 255)


COMPRESSING: dict[str, tuple[Any, Bound]] = {
    "allreduce": (allreduce.allreduce, _rounding(torch.float32)),
    "fp16_compress": (compress.fp16_compress, _rounding(torch.float16)),
    "bf16_compress": (compress.bf16_compress, _rounding(torch.bfloat16)),
    "quantize_per_tensor": (quantization.quantize_per_tensor, _one_level),
    "quantize_per_channel": (quantization.quantize_per_channel, _one_level),
}
"""Hooks whose state is the process group, and how exact they are."""


def compare_compressing(rank: int, world_size: int, subject: Subject, name: str, *, in_a_group: bool) -> str:
    """Train with one of `COMPRESSING`; in a group, on all ranks but the first."""
    hook, bound = COMPRESSING[name]
    members = range(1, world_size) if in_a_group else range(world_size)
    group = group_of(members) if in_a_group else None
    if rank not in members:
        return ""
    training = Training(subject, mlp, members, **({} if group is None else {"process_group": group}))
    training.wrapped.register_comm_hook(group, hook)
    for step in range(STEPS):
        training.backward(mean_square, step)
        local = training.local(mean_square, step)
        largest = max(_range(gradients) for gradients in local)
        for key, parameter in training.module.named_parameters():
            parts = torch.stack([gradient for of_rank in local if (gradient := of_rank[key]) is not None])
            assert parameter.grad is not None
            errors = (parameter.grad - parts.mean(dim=0)).abs()
            if bool((errors > bound(parts, largest)).any()):
                error, limit = errors.max(), bound(parts, largest).max()
                return f"{name}, iteration {step}, rank {rank}: {key!r} is off by {error:.3g}, limit {limit:.3g}"
    return ""


def _range(gradients: dict[str, Tensor | None]) -> float:
    flat = torch.cat([gradient.flatten() for gradient in gradients.values() if gradient is not None])
    return float(flat.max().clamp(min=0) - flat.min().clamp(max=0))


# PowerSGD

SIDE = 8


def _bilinear() -> nn.Module:
    """Build a square weight and a bias, whose gradients on a rank are constant and of rank 1."""
    parts = {"weight": nn.Parameter(torch.zeros(SIDE, SIDE)), "bias": nn.Parameter(torch.zeros(SIDE))}
    return Assembled(lambda own, left, right: ((left @ own.weight + own.bias) * right).sum(), **parts)


def compare_powersgd(rank: int, world_size: int, subject: Subject, *, feedback: bool) -> str:
    """Average with PowerSGD: exact for matrices of low rank, and with error feedback exact in the long run."""
    count, steps, matrix_rank = (SIDE, 48, 2) if feedback else (1, 4, world_size)
    training = Training(subject, _bilinear, bucket_cap_mb=25.0)
    weight, bias = training.module.parameters()
    how: dict[str, Any] = {"use_error_feedback": feedback, "warm_start": feedback, "min_compression_rate": 0.1}
    state = powersgd.PowerSGDState(None, matrix_rank, start_powerSGD_iter=2, **how)
    training.wrapped.register_comm_hook(state, powersgd.power_sgd)
    generators = [torch.Generator().manual_seed(one) for one in range(world_size)]
    everyone = [torch.randn(2, count, SIDE, generator=one) for one in generators]
    expected = torch.stack([left.mT @ right for left, right in everyone]).mean(dim=0)
    biases = torch.stack([right.sum(dim=0) for _, right in everyone])
    total = torch.zeros_like(expected)
    for step in range(steps):
        training.backward(lambda module, _, rank: module(*everyone[rank]), step)
        assert weight.grad is not None
        if problem := outside(bias.grad, biases.double(), torch.float32):
            return f"PowerSGD, iteration {step}, rank {rank}: the bias, which is not compressed: {problem}"
        total += weight.grad
        error = float((weight.grad - expected).norm() / expected.norm())
        if not feedback and error > 1e-3:
            return f"PowerSGD, iteration {step}, rank {rank}: a matrix of low rank is off by {error:.3g} of its norm"
    if state.iter != steps or not state.compression_stats()[2]:
        return f"PowerSGD, rank {rank}: {state.iter} of {steps} iterations counted, {state.compression_stats()}"
    error = float((total / steps - expected).norm() / expected.norm())
    if error > 0.2:
        return f"PowerSGD, rank {rank}: the mean of {steps} averages is off by {error:.3g} of its norm"
    return ""


# Checks


def check(bench: Bench) -> None:
    """A comm hook that averages changes nothing; one that halves the gradients, in its own tensor, halves them."""
    bench.needs("register_comm_hook")
    for options in bench.variants({"bucket_cap_mb": 2e-4}, VIEWS):
        for factor in (1.0, 0.5):
            bench.try_body(compare_hook, factor, options)
    bench.try_body(hides_errors)


def check_compressing(bench: Bench) -> None:
    """The comm hooks of `ddplab.reference.comm_hooks` are as exact as their kind of compression allows."""
    bench.needs("register_comm_hook")
    for name in COMPRESSING:
        bench.try_body(compare_compressing, name, in_a_group=False)
    if "process_group" in bench.offer.options:
        bench.averages_or_refuses("group", compare_compressing, "allreduce", in_a_group=True)
    for feedback in (False, True):
        bench.try_body(compare_powersgd, feedback=feedback)
