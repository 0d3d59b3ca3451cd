"""Exercises of tutorial 6."""

from collections.abc import Mapping
from math import sqrt

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from ddplab import CommHook, RankPool

from .. import compression
from ..bandwidths import POWER_SGD, dearer, iteration_ms
from ..exercises import Exercise, matches

GBIT_PER_S = 25
HOOKS = ("none", "fp16", "bf16")


def half_precision(_state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket in float16."""
    buffer = bucket.buffer()
    compressed = buffer.to(torch.float16) / dist.get_world_size()
    future = dist.all_reduce(compressed, async_op=True).get_future()

    return future.then(lambda _done: buffer.copy_(compressed))  # type: ignore[no-any-return]


def in_full_precision(_state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket without compression: right averages and too many bytes."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda _done: buffer)  # type: ignore[no-any-return]


def without_division(_state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Add up in float16, and forget to divide."""
    buffer = bucket.buffer()
    compressed = buffer.to(torch.float16)
    future = dist.all_reduce(compressed, async_op=True).get_future()
    return future.then(lambda _done: buffer.copy_(compressed))  # type: ignore[no-any-return]


def write_hook(pool: RankPool) -> Exercise:
    """Write a hook that averages in float16, and answer with its name."""

    def judge(name: str) -> bool | str:
        for given, averages, ours, sent, expected_bytes in pool.run(compression.try_hook, name):
            if not torch.equal(averages, ours):
                return f"from the gradients {given.tolist()}, a rank got {averages.tolist()}"
            if sent != expected_bytes:
                return f"the averages are right, but a rank sent {sent} bytes instead of {expected_bytes}"
        return True

    return Exercise(
        judge=judge,
        hints=(
            "answer with the name of an importable function, such as `half:hook`",
            "three steps: cast the buffer and divide; all-reduce with `async_op=True`; cast back after that",
            "`dist.all_reduce(..., async_op=True).get_future().then(f)` is a future of the result of `f`; let `f` "
            "copy the sum into the buffer with `copy_`, which casts, and return the buffer",
        ),
        explanation="half of the bytes, and the averages of `fp16_compress` to the last bit",
        solution=lambda: f"{__name__}:half_precision",
        code=half_precision,
        wrong=lambda: [f"{__name__}:in_full_precision", f"{__name__}:without_division", "nowhere:nothing", 1],
    )


def finite_averages(pool: RankPool) -> Exercise:
    """Name the hooks that give a finite average of two gradients of 40 000."""

    def finite() -> set[str]:
        return {hook for hook in HOOKS if pool.run(compression.averages, hook, [4e4])[0].isfinite().all()}

    def solution() -> list[str]:
        return ["none", "fp16", "bf16"]

    return Exercise(
        judge=lambda answer: matches(answer, finite()),
        hints=(
            "for each hook, compare every number that it computes on the way with the largest number of its type",
            "does the sum of both gradients ever exist in float16? Look at the order of the two operations",
        ),
        explanation="the hooks divide by the number of ranks before they add: the sum stays below float16's largest",
        solution=solution,
        wrong=lambda: [["none"], ["none", "bf16"], [], "fp16", 3],
    )


def break_even(hooks: Mapping[str, CommHook]) -> Exercise:
    """Find how many times as long PowerSGD may compute before it is slower than no hook, over `GBIT_PER_S`."""

    def saves(factor: float) -> bool:
        return iteration_ms(dearer(hooks[POWER_SGD], factor), GBIT_PER_S) < iteration_ms(hooks["none"], GBIT_PER_S)

    def solution() -> float:
        low, high = 1.0, 100.0
        while high / low > 1.01:
            middle = sqrt(low * high)
            low, high = (middle, high) if saves(middle) else (low, middle)
        return sqrt(low * high)

    return Exercise(
        judge=lambda answer: matches(answer, solution(), tolerance=0.05),
        hints=(
            "predict the iteration with the dearer hook and without a hook. Which factor makes them equal?",
            "try factors from 1 to 10, and halve the range in which the longer iteration changes",
        ),
        explanation="what fewer bytes save falls as the bandwidth grows, in proportion: the crossover divided by 25",
        solution=solution,
        wrong=lambda: [1, 100, 1.2 * solution(), "twice"],
    )
