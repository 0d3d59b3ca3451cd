"""FSDP2's `replicate()`, which torchtitan has used, as a class that wraps a module.

It is in torch 2.13: one all-reduce for each module that the function was applied to, and no buckets.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..reference.bucketing import wrapped_modules


class Replicated(nn.Module):
    """A module that `replicate()` has changed in place, with the methods of `DistributedDataParallel`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._depth = 0

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Call the module."""
        return self.module(*arguments, **named)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging them, by `set_requires_gradient_sync`."""
        self._depth += 1
        self.module.set_requires_gradient_sync(False)  # type: ignore[operator]
        try:
            yield
        finally:
            self._depth -= 1
            self.module.set_requires_gradient_sync(self._depth == 0)  # type: ignore[operator]


def replicate_modules(module: nn.Module, *, reduce_dtype: str | None = None) -> Replicated:
    """Apply FSDP2's `replicate()` as torchtitan does.

    It is applied to the modules of `wrapped_modules` or, if the names of the parameters don't show them, to the whole
    module alone. It leaves it to the script that all ranks start from equal parameters and buffers; so rank 0's are
    sent to all ranks before.

    `reduce_dtype` names the dtype of the all-reduces; None: that of the gradients. Raises ValueError if this version
    of torch has no such function.
    """
    try:
        from torch.distributed._composable.replicate_with_fsdp import replicate
        from torch.distributed.fsdp import MixedPrecisionPolicy
    except ImportError:
        raise ValueError(
            f"replicate: expected torch 2.13, whose replicate() is built on FSDP2, got {torch.__version__}"
        ) from None
    policy = MixedPrecisionPolicy(reduce_dtype=None if reduce_dtype is None else getattr(torch, reduce_dtype))
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), 0)
    calls: list[tuple[str, ...]] = []
    with suppress(ValueError):
        calls = wrapped_modules([name for name, _ in module.named_parameters()])
    for names in filter(None, dict.fromkeys(calls)):
        inner = [module.get_submodule(name) for name in names]
        replicate(inner if len(inner) > 1 else inner[0], mp_policy=policy)
    replicate(module, mp_policy=policy)  # changes the module in place
    return Replicated(module)
