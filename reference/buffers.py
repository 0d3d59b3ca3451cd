"""Buffers: rank 0's are broadcast before each synchronised forward pass, or a hook exchanges them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from .broadcast import broadcast_coalesced
from .parameters import synchronized_buffers

if TYPE_CHECKING:
    from .wrapper import DataParallel


@dataclass(frozen=True)
class BufferHook:
    """A function that replaces the broadcast of rank 0's buffers (torch: `_register_buffer_comm_hook`).

    Attributes:
        hook: `hook(state, buffers_by_name)`; returns None, or futures that the backward pass waits for.
        state: Passed to the hook.
        after_forward: Whether it runs after the forward pass, not before it.
    """

    hook: Callable[[Any, dict[str, Tensor]], "list[torch.futures.Future[Any]] | None"]
    state: Any
    after_forward: bool

    def __call__(self, buffers: dict[str, Tensor]) -> "list[torch.futures.Future[Any]]":
        """Call the hook; returns the futures to wait for."""
        return self.hook(self.state, buffers) or []


def before_forward(ddp: "DataParallel", *, candidate: bool = True) -> None:
    """Send the buffers if that is due before the forward pass; `candidate`: see `send_buffers`."""
    if _are_due(ddp) and not _hooked_after(ddp):
        send_buffers(ddp, candidate=candidate)


def after_forward(ddp: "DataParallel", *, candidate: bool = True) -> None:
    """Send the buffers if that is due after the forward pass; `candidate`: see `send_buffers`."""
    if _are_due(ddp) and _hooked_after(ddp):
        send_buffers(ddp, candidate=candidate)


def _are_due(ddp: "DataParallel") -> bool:
    return ddp.require_forward_param_sync and ddp.forward_sync_buffers and ddp.has_buffers


def _hooked_after(ddp: "DataParallel") -> bool:
    return ddp.buffer_hook is not None and ddp.buffer_hook.after_forward


def send_buffers(ddp: "DataParallel", *, candidate: bool = True) -> None:
    """Broadcast rank 0's buffers (under Join: those of the highest rank with inputs), or call the buffer hook.

    Args:
        ddp: The data-parallel module.
        candidate: Whether this rank may be the source under Join: it still has inputs.
    """
    source = ddp.agree_on_rank(candidate=candidate) if ddp._join_config.enable else 0
    named = synchronized_buffers(ddp.module)
    # The graph of an earlier forward pass may have saved a buffer; its backward pass must still be allowed.
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(named.values())):
        if ddp.buffer_hook is None:
            broadcast_coalesced(list(named.values()), ddp.process_group, source=source)
        else:
            ddp.reducer.after_backward += ddp.buffer_hook(named)
