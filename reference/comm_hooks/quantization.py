"""Quantisation to 8 bits: each rank sends its gradients as levels between its smallest and largest gradient.

Affine quantisation as in Jacob et al., "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", CVPR 2018, section 2.1, equation 1: r = S (q - Z).

Each rank has its own scale, so an all-reduce cannot add the levels. They are all-gathered instead: each rank receives
`(world size - 1) * (elements + 8 * channels)` bytes; from 8 ranks on a ring all-reduce of float32 needs fewer.
"""

from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from ..message_sizes import CHANNEL_ELEMENTS, channel_shape, quantized_parts_bytes
from .allreduce import noop
from .interface import used_on_this_stream

LEVELS = 256


def quantize_per_tensor(state: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average with one scale for each bucket; a rank's error is at most half a level, 1 / 510 of its range."""
    return quantize_per_channel(state, bucket, None)


def quantize_per_channel(
    state: dist.ProcessGroup | None, bucket: GradBucket, channel_elements: int | None = CHANNEL_ELEMENTS
) -> torch.futures.Future[Tensor]:
    """Average with one scale for every `channel_elements` elements (None: all): smaller ranges, smaller error."""
    flat = bucket.buffer()
    if not flat.is_floating_point():
        raise TypeError(f"quantisation: expected real gradients, got {flat.dtype}")
    if not flat.numel():
        return noop(state, bucket)
    shape = channel_shape(flat.numel(), channel_elements)
    padded = torch.nn.functional.pad(flat.float(), (0, prod(shape) - flat.numel())).view(shape)
    mine = quantize(padded)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(state))]

    def add(_gathered: torch.futures.Future[Any]) -> Tensor:
        used_on_this_stream(*everyones)
        total = torch.zeros_like(padded)
        for data in everyones:
            total += dequantize(data, shape)
        return flat.copy_(total.flatten()[: flat.numel()].div_(len(everyones)))

    gathering: torch.futures.Future[Any] = dist.all_gather(everyones, mine, group=state, async_op=True).get_future()
    return gathering.then(add)


def quantize(channels: Tensor) -> Tensor:
    """Quantise rows of real numbers, of shape [count, elements]; each row gets its own scale.

    Zero is always one of the levels, so a gradient of zero stays zero. Returns bytes: a float32 scale for each row, a
    float32 zero point for each row, then one level for each number.
    """
    low = channels.amin(1, keepdim=True).clamp(max=0)
    high = channels.amax(1, keepdim=True).clamp(min=0)
    scales = ((high - low) / (LEVELS - 1)).clamp(min=torch.finfo(torch.float32).tiny)  # S
    zeros = (-low / scales).round_()  # Z
    levels = (channels / scales).round_().add_(zeros).clamp_(0, LEVELS - 1)  # q = r / S + Z
    return torch.cat([part.flatten() for part in (scales.view(torch.uint8), zeros.view(torch.uint8), levels.byte())])


def dequantize(data: Tensor, shape: tuple[int, int]) -> Tensor:
    """The inverse of `quantize`, to half a level; `shape` is [channels, elements]."""
    scales, zeros, levels = data.split(quantized_parts_bytes(*shape))
    steps: Tensor = levels.view(shape) - zeros.view(torch.float32)[:, None]
    return steps.mul_(scales.view(torch.float32)[:, None])  # r = S (q - Z)
