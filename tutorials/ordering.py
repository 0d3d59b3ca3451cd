"""Tutorial 3's ranks: when gradients are ready, and in which order they are sent."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from reference import models
from reference.data_parallel import DistributedDataParallel
from reference.parameters import trainable_parameters
from reference.recorder import record
from reference.trace import Trace

from .averaging import INPUTS, batch, gradient


def record_alone(_rank: int, _world_size: int, model: str, iterations: int) -> Trace:
    """When each gradient is ready, without any communication."""
    module, loss_fn = models.build(model)
    with record(module, model=model) as recording:
        for _ in range(iterations):
            loss_fn(module).backward()
    return recording.trace


def record_reducer(_rank: int, _world_size: int, model: str, arguments: Mapping[str, Any], iterations: int) -> Trace:
    """When each gradient is ready and each bucket ready, launched, done and copied out, under our reducer."""
    module, loss_fn = models.build(model)
    ddp = DistributedDataParallel(module, **arguments)
    with record(ddp, model=model) as recording:
        for _ in range(iterations):
            loss_fn(ddp).backward()
    return recording.trace


class TwoBranches(nn.Module):
    """Two layers of one shape, of which each rank uses another one last: so their gradients come in another order."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Linear(INPUTS, INPUTS, bias=False)
        self.right = nn.Linear(INPUTS, INPUTS, bias=False)
        self.order = ("left", "right") if rank == 0 else ("right", "left")

    def forward(self, inputs: Tensor) -> Tensor:
        """Both layers, in this rank's order."""
        for name in self.order:
            inputs = torch.tanh(self.get_submodule(name)(inputs))
        return inputs


Sent = tuple[list[str], list[Tensor], list[Tensor]]
"""Names in the order in which gradients came, a rank's own gradients, and what it holds after averaging."""


def send_at_once(rank: int, world_size: int) -> Sent:
    """Each gradient of `TwoBranches` is sent as soon as it comes."""
    model = TwoBranches(rank)
    own, came, works = _own_gradients(model), [], []

    def arrived(name: str, parameter: Tensor) -> None:
        came.append(name)
        works.append(dist.all_reduce(gradient(parameter), async_op=True))

    _listen(model, arrived)
    _loss_of_branches(model).backward()
    for work in works:
        work.wait()
    return came, own, [gradient(parameter) / world_size for parameter in model.parameters()]


def send_in_order(rank: int, _world_size: int) -> Sent:
    """Our reducer sends them, in one bucket each."""
    model = TwoBranches(rank)
    own, came = _own_gradients(model), []
    _listen(model, lambda name, _parameter: came.append(name))
    ddp = DistributedDataParallel(model, plan=[[name] for name, _ in reversed(list(model.named_parameters()))])
    _loss_of_branches(ddp).backward()
    return came, own, [gradient(parameter) for parameter in model.parameters()]


def layouts(_rank: int, _world_size: int, model: str, cap_mb: float, iterations: int) -> list[list[list[str]]]:
    """Parameter names by bucket, in each iteration."""
    module, loss_fn = models.build(model)
    ddp = DistributedDataParallel(module, bucket_cap_mb=cap_mb)
    names = list(trainable_parameters(module))
    seen = []
    for _ in range(iterations):
        loss_fn(ddp).backward()
        seen.append([[names[index] for index in bucket] for bucket in ddp.reducer.buckets.assignment])
    return seen


def done_ms(ready_ms: Sequence[float], *, per_bucket: int, all_reduce_ms: float) -> tuple[float, float]:
    """When the last bucket of equal parameters is done, in reverse order of registration and in that order."""
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


def _listen(model: nn.Module, arrived: Callable[[str, Tensor], None]) -> None:
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(arrived, name))
