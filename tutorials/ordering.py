"""Rank functions of tutorials 3 and 4: ready times of gradients, and the order in which they are sent."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddplab import models
from reference.data_parallel import DistributedDataParallel
from reference.parameters import trainable_parameters
from reference.recorder import record
from reference.trace import Trace

from .averaging import INPUTS, batch, gradient


def record_alone(_rank: int, _world_size: int, model: str, iterations: int) -> Trace:
    """Record when each gradient is ready, without communication."""
    module, loss_fn = models.build(model)
    with record(module, model=model) as recording:
        for _ in range(iterations):
            loss_fn(module).backward()
    return recording.trace


def record_reducer(_rank: int, _world_size: int, model: str, arguments: Mapping[str, Any], iterations: int) -> Trace:
    """Record when each gradient is ready, and when our reducer launches, finishes and copies out each bucket."""
    module, loss_fn = models.build(model)
    ddp = DistributedDataParallel(module, **arguments)
    with record(ddp, model=model) as recording:
        for _ in range(iterations):
            loss_fn(ddp).backward()
    return recording.trace


class TwoBranches(nn.Module):
    """Two layers of the same shape, which the two ranks use in opposite order, so that their ready orders differ."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Linear(INPUTS, INPUTS, bias=False)
        self.right = nn.Linear(INPUTS, INPUTS, bias=False)
        self.order = ("left", "right") if rank == 0 else ("right", "left")

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply both layers in the order of this rank."""
        for name in self.order:
            inputs = torch.tanh(self.get_submodule(name)(inputs))
        return inputs


Sent = tuple[list[str], list[Tensor], list[Tensor]]
"""Parameter names in ready order, the rank's own gradients, and its gradients after averaging."""


def send_at_once(rank: int, world_size: int) -> Sent:
    """Launch the all-reduce of each gradient of `TwoBranches` as soon as it is ready."""
    model = TwoBranches(rank)
    own, ready_order, handles = _own_gradients(model), [], []

    def ready(name: str, parameter: Tensor) -> None:
        ready_order.append(name)
        handles.append(dist.all_reduce(gradient(parameter), async_op=True))

    _when_ready(model, ready)
    _loss_of_branches(model).backward()
    for handle in handles:
        handle.wait()
    return ready_order, own, [gradient(parameter) / world_size for parameter in model.parameters()]


def send_in_order(rank: int, _world_size: int) -> Sent:
    """Launch the all-reduces in the same order on all ranks, with our reducer and one bucket for each gradient."""
    model = TwoBranches(rank)
    own, ready_order = _own_gradients(model), []
    _when_ready(model, lambda name, _parameter: ready_order.append(name))
    ddp = DistributedDataParallel(model, plan=[[name] for name, _ in reversed(list(model.named_parameters()))])
    _loss_of_branches(ddp).backward()
    return ready_order, own, [gradient(parameter) for parameter in model.parameters()]


def buckets_by_iteration(
    _rank: int, _world_size: int, model: str, cap_mb: float, iterations: int
) -> list[list[list[str]]]:
    """Parameter names of each bucket, in each iteration."""
    module, loss_fn = models.build(model)
    ddp = DistributedDataParallel(module, bucket_cap_mb=cap_mb)
    names = list(trainable_parameters(module))
    seen = []
    for _ in range(iterations):
        loss_fn(ddp).backward()
        seen.append([[names[index] for index in bucket] for bucket in ddp.reducer.buckets.assignment])
    return seen


def done_ms(ready_ms: Sequence[float], *, per_bucket: int, all_reduce_ms: float) -> tuple[float, float]:
    """When the last bucket is done, in reverse registration order and in registration order.

    Args:
        ready_ms: When the gradient of each parameter is ready, in registration order; all have the same size.
        per_bucket: Number of parameters in a bucket.
        all_reduce_ms: Duration of the all-reduce of a bucket.
    """
    ends = []
    for order in (ready_ms[::-1], ready_ms):
        end = 0.0
        for first in range(0, len(order), per_bucket):
            end = max(end, *order[first : first + per_bucket]) + all_reduce_ms
        ends.append(end)
    return ends[0], ends[1]


def _own_gradients(model: nn.Module) -> list[Tensor]:
    _loss_of_branches(model).backward()
    own = [gradient(parameter).clone() for parameter in model.parameters()]
    model.zero_grad()
    return own


def _loss_of_branches(model: nn.Module) -> Tensor:
    loss: Tensor = model(batch()[0].float()).square().mean()
    return loss


def _when_ready(model: nn.Module, ready: Callable[[str, Tensor], None]) -> None:
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(ready, name))
