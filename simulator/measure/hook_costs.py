"""Hooks: what a comm hook computes, told apart from what its collectives take.

Each bucket goes through the real hook by itself, on all ranks at once: what the hook of one bucket computes while
another's collectives run is slowed down, and that is charged apart.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from reference import models
from reference.bucketing import MIB, assign_buckets
from reference.buckets import Bucket
from reference.comm_hooks.allreduce import noop
from reference.comm_hooks.compress import bf16_compress, compress, fp16_compress
from reference.comm_hooks.interface import GradBucket, Hook
from reference.comm_hooks.powersgd import PowerSGDState, batched_power_sgd, power_sgd
from reference.comm_hooks.quantization import quantize_per_channel, quantize_per_tensor
from reference.launch import report_progress
from reference.parameters import bucket_key, size_bytes, sparse_parameters, trainable_parameters

from .reducer_costs import pack
from .timing import ObservedCollective, clock_ns, observe_collectives

CAPS_BYTES = [MIB // 64, MIB // 16, MIB // 4, MIB, 4 * MIB, 16 * MIB, 25 * MIB]
"""Of the buckets: as different in size as the model's gradients allow, the largest as by default."""

WARM_UP = 4
"""Calls that do not count: PowerSGD compresses from the third on, and begins with its last Q from the fourth."""


def _no_state(_rank: int) -> None:
    """Of hooks that need none: they average over all ranks."""


def _power_sgd_state(rank: int) -> PowerSGDState:
    return PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)


REAL_HOOKS: dict[str, tuple[Hook, Callable[[int], Any]]] = {
    "noop": (noop, _no_state),
    "fp16": (fp16_compress, _no_state),
    "bf16": (bf16_compress, _no_state),
    "quantize_per_tensor": (quantize_per_tensor, _no_state),
    "quantize_per_channel": (quantize_per_channel, _no_state),
    "power_sgd": (power_sgd, _power_sgd_state),
    "batched_power_sgd": (batched_power_sgd, _power_sgd_state),
}
"""By name, with what makes its state of the rank of an approximation; `iteration.comm_hook.HOOKS` but for `none`."""


HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""By the prefix that `named_hook` takes."""


def real_hook(name: str) -> tuple[Hook, Callable[[], Any]]:
    """A hook, and what makes its state, by the name that `named_hook` takes; but for `none`."""
    dtype, plus, inner = name.partition("+")
    if plus:
        hook, make_state = real_hook(inner)
        return compress(HALVES[dtype])(hook), make_state
    kind, _, approximation_rank = name.partition(":")
    hook, make_state_of_rank = REAL_HOOKS[kind]
    return hook, partial(make_state_of_rank, int(approximation_rank or 1))


class Parts(NamedTuple):
    """Nanoseconds that a hook computes: before, between and after its collectives. None: it has nothing there."""

    compress: int
    recompress: int | None
    decompress: int | None


def time_hook(rank: int, _world_size: int, name: str, model: str, repeats: int) -> list[tuple[int, list[Parts]]]:
    """Bytes of each bucket, and what the hook took with it, repetition by repetition.

    Args:
        rank: This rank.
        name: Of the hook, as `real_hook` takes it.
        model: Whose gradients, with random numbers in them, make the buckets.
        repeats: Calls that count.
    """
    hook, make_state = real_hook(name)
    buckets = [(bucket, make_state()) for bucket in _buckets(models.build(model)[0])]
    taken: list[list[Parts]] = [[] for _ in buckets]
    for done in range(WARM_UP + repeats):
        if rank == 0:
            report_progress(f"calibrating {name}", done, WARM_UP + repeats)
        for (bucket, state), parts in zip(buckets, taken, strict=True):
            bucket.reset()
            pack(bucket, scale=1.0)  # undivided, as hooks get them
            dist.barrier()
            parts.append(time_parts(hook, state, bucket))
    return [(bucket.size_bytes, parts[WARM_UP:]) for (bucket, _), parts in zip(buckets, taken, strict=True)]


def _buckets(module: nn.Module) -> list[Bucket]:
    """Of the module's dense gradients in reverse order."""
    sparse = sparse_parameters(module)
    parameters = [parameter for name, parameter in trainable_parameters(module).items() if name not in sparse]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    assigned = assign_buckets(
        [size_bytes(parameter) for parameter in parameters],
        CAPS_BYTES,
        keys=[bucket_key(parameter) for parameter in parameters],
        order=range(len(parameters))[::-1],
    )
    return [Bucket(indices, [parameters[index] for index in indices]) for indices in assigned]


def time_parts(hook: Hook, state: Any, bucket: Bucket) -> Parts:
    """Call the hook with a bucket that has been packed, and wait for what it returns."""
    whole = ObservedCollective(clock_ns())
    with observe_collectives("all_reduce", "all_gather") as collectives:
        whole.issued_ns = clock_ns()
        future = hook(state, GradBucket(bucket, 0, is_last=True))  # PowerSGD's second collective comes at once
        future.add_done_callback(lambda _: whole.finish())
        whole.wait()
        future.wait()  # raises what went wrong
    return split(whole, collectives)


def split(whole: ObservedCollective, collectives: list[ObservedCollective]) -> Parts:
    """What a hook computed.

    Args:
        whole: From its call until its future had a result.
        collectives: What it issued meanwhile, each after the one before was done. None of them: all is `compress`.
    """
    starts = [whole.issued_ns, *(collective.wait() for collective in collectives)]
    ends = [*(collective.issued_ns for collective in collectives), whole.wait()]
    compress, *others = (max(0, end - start) for start, end in zip(starts, ends, strict=True))
    if not others:
        return Parts(compress, None, None)
    *between, decompress = others
    return Parts(compress, sum(between) if between else None, decompress)
