"""Naive data parallelism: one all-reduce for each parameter after the backward pass, as a baseline."""

from typing import Any

import torch.distributed as dist
from torch import nn

from .broadcast import broadcast_coalesced
from .checks.construction import resolve_group


class NaiveDataParallel(nn.Module):
    """Averages gradients one by one after the backward pass: correct but slow, for comparison and teaching.

    Call `average_gradients` between the backward pass and the optimiser step, on every rank.
    """

    def __init__(self, module: nn.Module, *, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.module = module
        self.process_group = resolve_group(process_group)
        broadcast_coalesced([*module.parameters(), *module.buffers()], self.process_group)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The output of the module."""
        return self.module(*inputs, **kwargs)

    def average_gradients(self) -> None:
        """Replace every gradient by its average over the ranks."""
        world_size = dist.get_world_size(self.process_group)
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= world_size  # before the sum, which could overflow in half precision
                dist.all_reduce(parameter.grad, group=self.process_group)
