"""Buffers: rank 0's are broadcast before each synchronised forward pass, or a hook exchanges them."""

from typing import TYPE_CHECKING

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parallel.distributed import _BufferCommHookLocation

from .broadcast import broadcast_coalesced
from .parameters import synchronized_buffers

if TYPE_CHECKING:
    from .module_wrapper import DataParallel


def are_due(ddp: "DataParallel") -> bool:
    """Whether the next synchronised forward pass sends buffers."""
    return ddp.require_forward_param_sync and ddp.forward_sync_buffers and ddp._own.has_buffers


def send_if_due(ddp: "DataParallel", *, after_forward: bool, candidate: bool = True) -> None:
    """Send the buffers if that is due at this place, before or after the module runs."""
    hook = ddp._own.buffer_hook
    hooked_after = hook is not None and hook.buffer_comm_hook_location == _BufferCommHookLocation.POST_FORWARD
    if are_due(ddp) and hooked_after == after_forward:
        send_buffers(ddp, candidate=candidate)


def send_buffers(ddp: "DataParallel", *, candidate: bool = True) -> None:
    """Broadcast rank 0's buffers, or call the buffer hook.

    Under Join, the source is the highest rank among the candidates, which still have inputs.
    """
    source = ddp._find_common_rank(ddp.process_group.rank(), candidate) if ddp._join_config.enable else 0
    named = synchronized_buffers(ddp.module)
    # The graph of an earlier forward pass may have saved a buffer; its backward pass must still be allowed.
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(named.values())):
        if (hook := ddp._own.buffer_hook) is None:
            broadcast_coalesced(list(named.values()), ddp.process_group, source=source)
        else:  # returns None, or futures that the backward pass waits for
            ddp.reducer.after_backward += hook.buffer_comm_hook(hook.buffer_comm_hook_state, named) or []
