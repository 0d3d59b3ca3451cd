"""Composable data parallelism: torch's `replicate()`, which changes a module in place, as a class that wraps it.

There are two in torch 2.13. `torch.distributed._composable:replicate` makes a `DistributedDataParallel` of the
parameters in the first forward pass. `torch.distributed._composable.replicate_with_fsdp:replicate`, which torchtitan
has used, is built on FSDP2: one all-reduce for each module that it was applied to, and no buckets.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from reference.bucketing import wrapped_modules


class Replicated(nn.Module):
    """A module that a composable function has changed, with the methods of `DistributedDataParallel`.

    Args:
        module: The module, which FSDP2's `replicate()` was applied to, or to its submodules too.
    """

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


class ReplicatedByDDP(Replicated):
    """Likewise, if the function makes a `DistributedDataParallel`.

    It is made here instead of in the first forward pass, and takes comm hooks also afterwards: a hook that a script
    gives to `replicate()`'s module after the first forward pass has no effect.

    Attributes:
        reducer: As that of `DistributedDataParallel`.
    """

    def __init__(self, module: nn.Module, ddp: DistributedDataParallel) -> None:
        super().__init__(module)
        self.reducer = ddp.reducer
        self.register_comm_hook = ddp.register_comm_hook
        self._get_ddp_logging_data = ddp._get_ddp_logging_data


def is_composable(make: Callable[..., Any]) -> bool:
    """Whether a function changes a module in place, as torch's `contract` marks it."""
    return inspect.isfunction(make) and callable(getattr(make, "state", None))


def is_built_on_fsdp(make: Callable[..., Any]) -> bool:
    """Whether a function is FSDP2's `replicate()`."""
    return is_composable(make) and "mesh" in inspect.signature(make).parameters


def arguments_of(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the arguments of a composable function after the module.

    `**kwargs` are those of `DistributedDataParallel`, which gets the parameters alone: so not those of buffers.
    """
    _, *arguments = inspect.signature(make).parameters.values()
    passed_on = any(one.kind is one.VAR_KEYWORD for one in arguments)
    _, _, *of_ddp = inspect.signature(DistributedDataParallel.__init__).parameters.values()
    every = [*(of_ddp if passed_on else ()), *arguments]
    return {
        one.name: one
        for one in every
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and not one.name.endswith("_buffers")
    }


def replicated(make: Callable[..., Any], module: nn.Module, **options: Any) -> Replicated:
    """Apply a composable function to a module, as torchtitan does if the function is built on FSDP2.

    FSDP2's `replicate()` is applied to the modules of `wrapped_modules` or, if the names of the parameters don't show
    them, to the whole module alone. It leaves it to the script that all ranks start from equal parameters and
    buffers; so rank 0's are sent to all ranks before.
    """
    if not is_built_on_fsdp(make):
        state = make.state(make(module, **options))  # type: ignore[attr-defined]
        state.lazy_init()
        return ReplicatedByDDP(module, state._ddp)
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), 0)
    try:
        calls = dict.fromkeys(wrapped_modules([name for name, _ in module.named_parameters()]))
    except ValueError:
        calls = {}
    for names in filter(None, calls):
        inner = [module.get_submodule(name) for name in names]
        make(inner if len(inner) > 1 else inner[0], **options)
    return Replicated(make(module, **options))


def replicate_modules(module: nn.Module, *, reduce_dtype: str | None = None) -> Replicated:
    """Apply FSDP2's `replicate()` as torchtitan does; see `replicated`.

    Args:
        module: The module.
        reduce_dtype: Name of the dtype of the all-reduces. None: that of the gradients.

    Raises:
        ValueError: This version of torch has no such function.
    """
    try:
        from torch.distributed._composable.replicate_with_fsdp import replicate
    except ImportError:
        raise ValueError(
            f"replicate: expected torch 2.13, whose replicate() is built on FSDP2, got {torch.__version__}"
        ) from None
    policy = MixedPrecisionPolicy(reduce_dtype=None if reduce_dtype is None else getattr(torch, reduce_dtype))
    return replicated(replicate, module, mp_policy=policy)


def show_parameters(module: nn.Module) -> None:
    """Put the parameters that the optimiser has back into their modules: FSDP2 does so only after a backward pass."""
    for one in module.modules():
        if isinstance(one, FSDPModule):
            one.reshard()


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: of a DTensor, as FSDP2's parameters are, its local tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
