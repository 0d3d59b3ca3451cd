"""A data-parallel class that averages each gradient by an all-reduce of its own, during the backward pass."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class MyDDP(nn.Module):
    """Launches all-reduces in reverse registration order on every rank; `average_gradients` waits for them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._order = [parameter for parameter in reversed(list(module.parameters())) if parameter.requires_grad]
        self._ready: set[nn.Parameter] = set()
        self._launched: list[tuple[Any, Tensor]] = []
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), 0)
        for parameter in self._order:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)

    def average_gradients(self) -> None:
        """Call after each backward pass."""
        self._launch(missing=True)
        for work, gradient in self._launched:
            work.wait()
            gradient.div_(dist.get_world_size())
        self._launched.clear()
        self._ready.clear()

    def _arrived(self, parameter: nn.Parameter) -> None:
        self._ready.add(parameter)
        self._launch(missing=False)

    def _launch(self, *, missing: bool) -> None:
        """Launch what is ready up to the first gradient that is missing, or all, with zeros for those."""
        for parameter in self._order[len(self._launched) :]:
            if parameter not in self._ready and not missing:
                return
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._launched.append((dist.all_reduce(parameter.grad, async_op=True), parameter.grad))
