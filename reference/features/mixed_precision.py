"""Mixed precision (torch's `_MixedPrecision`): forward and backward in one dtype, all-reduces in another.

In each iteration:

1. Forward. Inputs are cast, and low-precision copies stand in place of the parameters; see `parameter_stand_ins`.
   Buffers were cast once, at construction.
2. Backward. Autograd computes gradients in low precision and casts each back on its way to the parameter, so
   gradients are accumulated in full precision.
3. All-reduce. The comm hook `sum_in_low_precision` casts each bucket to the dtype of the reduction and back.
4. Optimiser step. Parameters and gradients have full precision; the module's state dict always has.

Nothing here blocks the host, and all casts run on the current stream.
"""

import weakref
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from ..comm_hooks.interface import only_tensor
from ..parameters import ignored_names, sparse_parameters, synchronized_buffers
from .parameter_stand_ins import StandIn

DTYPES = ("param_dtype", "reduce_dtype", "buffer_dtype")
"""Attributes of torch's `_MixedPrecision`; each is a dtype or None: as it is."""


class ReductionState(NamedTuple):
    """State of `sum_in_low_precision`: the dtype of the all-reduces, and the module, whose group may change."""

    dtype: torch.dtype
    ddp: "weakref.ref[Any]"


def check_config(config: Any) -> None:
    """Raise TypeError for what is neither None nor a `_MixedPrecision`, ValueError if its dtypes are no floats."""
    for name in DTYPES if config is not None else ():
        if not hasattr(config, name):
            raise TypeError(
                f"mixed_precision: expected torch.nn.parallel.distributed._MixedPrecision(param_dtype=..., "
                f"reduce_dtype=..., buffer_dtype=...), got {config!r}, which has no {name}"
            )
        dtype = getattr(config, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"mixed_precision: expected {name} to be a floating-point dtype or None, got {dtype!r}")


def casts(module: nn.Module, config: Any) -> dict[nn.Parameter, StandIn]:
    """The cast of each parameter that forward computes with in low precision: all but the ignored ones.

    Each also gets torch's attributes: `_fp_param`, its data, and `_mp_param`, a tensor of the low precision without
    memory, because the copy exists only while autograd needs it.
    """
    if (dtype := config.param_dtype) is None:
        return {}
    ignored = ignored_names(module)
    named = list(nn.Module.named_parameters(module, remove_duplicate=False))
    skipped = {parameter for name, parameter in named if name in ignored}
    chosen = [p for _, p in named if p not in skipped and p.is_floating_point()]
    for parameter in chosen:
        low: Any = torch.empty_like(parameter, dtype=dtype, device="meta")
        parameter._mp_param, parameter._fp_param = low, parameter.data  # type: ignore[attr-defined]
    sparse = set(map(module.get_parameter, sparse_parameters(module)))
    cast, cast_sparse = partial(Tensor.to, dtype=dtype), partial(_CastOfSparseGradient.apply, dtype)
    return {p: cast_sparse if p in sparse else cast for p in chosen}


class _CastOfSparseGradient(torch.autograd.Function):
    """`Tensor.to` for a parameter with sparse gradients, which autograd's own cast refuses."""

    @staticmethod
    def forward(context: Any, dtype: torch.dtype, parameter: Tensor) -> Tensor:
        context.dtype = parameter.dtype
        return parameter.to(dtype)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0].to(context.dtype)


def cast_buffers(module: nn.Module, config: Any) -> None:
    """Cast all floating-point buffers but the ignored ones to `buffer_dtype`, for good."""
    if config.buffer_dtype is None:
        return
    for buffer in synchronized_buffers(module).values():
        if buffer.is_floating_point():
            buffer.data = buffer.to(config.buffer_dtype)


def sum_in_low_precision(state: ReductionState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Comm hook: average a bucket in another dtype. Divides after adding, as torch's does."""
    ddp = state.ddp()
    assert ddp is not None
    group = ddp.process_group
    low: Tensor = bucket.buffer().to(state.dtype)
    world_size = group.size()  # the callback must not hold the group; see `comm_hooks.interface`
    future: torch.futures.Future[Any] = dist.all_reduce(low, group=group, async_op=True).get_future()
    return future.then(lambda done: only_tensor(done).div_(world_size))
