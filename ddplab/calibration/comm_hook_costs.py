"""Measures the computing time of a comm hook for a bucket, without the time of its collectives.

The real hook is called with one bucket at a time, on all ranks at once. In training, a hook may compute while
collectives of other buckets run; this slow-down is measured separately, in `slow_downs`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import models
from ..reference.bucketing import MIB, assign_buckets
from ..reference.buckets import Bucket
from ..reference.comm_hooks.allreduce import noop
from ..reference.comm_hooks.compress import bf16_compress, compress, fp16_compress
from ..reference.comm_hooks.interface import GradBucket, Hook
from ..reference.comm_hooks.powersgd import PowerSGDState, batched_power_sgd, power_sgd
from ..reference.comm_hooks.quantization import quantize_per_channel, quantize_per_tensor
from ..reference.launch import report_progress
from ..reference.parameters import bucket_key, sparse_parameters, trainable_parameters
from .reducer_costs import pack_bucket
from .repeated_timing import TimedCollective, let_host_lead, meet, read_clock, timed_collectives

# Real hooks by name

REAL_HOOKS: dict[str, Hook] = {
    "noop": noop,
    "fp16": fp16_compress,
    "bf16": bf16_compress,
    "quantize_per_tensor": quantize_per_tensor,
    "quantize_per_channel": quantize_per_channel,
    "power_sgd": power_sgd,
    "batched_power_sgd": batched_power_sgd,
}
"""Hook functions by name; the names are those of `schedule.comm_hook_messages.HOOKS` without `none`."""
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Half-precision types by the prefix that `named_hook` takes."""


def real_hook(name: str) -> tuple[Hook, Callable[[], Any]]:
    """Return a hook function and a function that makes its state; the name is one of `named_hook` but `none`."""
    dtype, plus, inner = name.partition("+")
    if plus:
        hook, make_state = real_hook(inner)
        return compress(HALVES[dtype])(hook), make_state
    kind, _, rank = name.partition(":")
    if kind not in ("power_sgd", "batched_power_sgd"):
        return REAL_HOOKS[kind], lambda: None  # averages over all ranks
    state_of_rank = partial(PowerSGDState, None, start_powerSGD_iter=2)
    return REAL_HOOKS[kind], partial(state_of_rank, matrix_approximation_rank=int(rank or 1))


# The measurement

CAPS_BYTES = [MIB // 64, MIB // 16, MIB // 4, MIB, 4 * MIB, 16 * MIB, 25 * MIB]
"""Caps of successive buckets, which give buckets of different sizes; the largest is DDP's default."""
WARM_UP = 4
"""Warm-up calls: PowerSGD compresses from the third call on, and reuses its last Q from the fourth."""
HOOK_LEAD_MS = 20.0
"""More than the host takes to launch a hook's kernels; PowerSGD has hundreds."""


class HookParts(NamedTuple):
    """Nanoseconds that a hook computes before, between and after its collectives; None if it has no such part."""

    compress: int
    recompress: int | None
    decompress: int | None


def time_hook(rank: int, _world_size: int, name: str, model: str, repeats: int) -> list[tuple[int, list[HookParts]]]:
    """Time `repeats` calls of a hook on each bucket of the model's gradients, which hold random numbers.

    Returns the bytes of each bucket with the parts of each call.
    """
    hook, make_state = real_hook(name)
    buckets = [(bucket, make_state(), list[HookParts]()) for bucket in _buckets(models.build(model)[0])]
    for done in range(WARM_UP + repeats):
        if rank == 0:
            report_progress(f"calibrating {name}", done, WARM_UP + repeats)
        for bucket, state, calls in buckets:
            bucket.reset()
            pack_bucket(bucket, scale=1.0)  # not divided by the world size, because hooks divide themselves
            meet()
            calls.append(time_parts(hook, state, bucket))
    return [(bucket.size_bytes, calls[WARM_UP:]) for bucket, _, calls in buckets]


def _buckets(module: nn.Module) -> list[Bucket]:
    """Make buckets of the module's dense gradients, in reverse registration order."""
    sparse = sparse_parameters(module)
    parameters = [parameter for name, parameter in trainable_parameters(module).items() if name not in sparse]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    sizes_bytes, keys = [one.nbytes for one in parameters], list(map(bucket_key, parameters))
    assigned = assign_buckets(sizes_bytes, CAPS_BYTES, keys=keys, order=range(len(parameters))[::-1])
    return [Bucket(indices, [parameters[index] for index in indices]) for indices in assigned]


def time_parts(hook: Hook, state: Any, bucket: Bucket) -> HookParts:
    """Call a hook with a packed bucket, wait for its future, and time its parts."""
    let_host_lead(HOOK_LEAD_MS)
    with timed_collectives("all_reduce", "all_gather") as collectives:
        call = TimedCollective(read_clock())
        # With `is_last`, PowerSGD issues its second collective without waiting for another bucket.
        future = hook(state, GradBucket(bucket, 0, is_last=True))
        future.add_done_callback(lambda _: call.finish())
        call.wait()
        future.wait()  # raises the error if the hook failed
    return parts_of(call, collectives)


def parts_of(call: TimedCollective, collectives: list[TimedCollective]) -> HookParts:
    """Return how long a hook computed: the parts of its call in which none of its collectives was in flight.

    The call ends with the result of its future. Without collectives, it is all `compress`.
    """
    starts = [call.issued_ns, *(collective.wait() for collective in collectives)]
    ends = [*(collective.issued_ns for collective in collectives), call.wait()]
    compress, *others = (max(0, end - start) for start, end in zip(starts, ends, strict=True))
    if not others:
        return HookParts(compress, None, None)
    *between, decompress = others
    return HookParts(compress, sum(between) if between else None, decompress)
