"""Broadcast of parameters and buffers from one rank to all: at construction, and of buffers in each forward pass."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parallel.distributed import _BufferCommHookLocation
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .message_sizes import send_in_pieces
from .parameters import bucket_key, synchronized_buffers, synchronized_parameters

if TYPE_CHECKING:
    from .module_wrapper import DataParallel


def broadcast_coalesced(tensors: Sequence[Tensor], group: dist.ProcessGroup, *, source: int = 0) -> None:
    """Overwrite `tensors` on every rank with those of `source`, a rank within the group.

    Expanded tensors, conjugate and negative views are written through to the memory that they show.
    Tensors of one dtype and device are flattened into pieces, of which few are in flight; see `send_in_pieces`.
    Blocks until all pieces have arrived.
    """
    tensors = [plain for tensor in tensors for plain in plain_tensors(tensor)]
    is_source = group.rank() == source

    def launch(indices: list[int]) -> tuple[list[Tensor], Tensor, Any]:
        piece = [tensors[index] for index in indices]
        if is_source:
            flat: Tensor = _flatten_dense_tensors([tensor.detach() for tensor in piece])
            flat = flat.resolve_conj().resolve_neg()  # collectives send memory as it is
        else:
            flat = piece[0].new_empty(sum(tensor.numel() for tensor in piece))
        return piece, flat, dist.broadcast(flat, group_src=source, group=group, async_op=True)

    def finish(sent: tuple[list[Tensor], Tensor, Any]) -> None:
        piece, flat, work = sent
        work.wait()
        if not is_source:
            with torch.no_grad():
                _overwrite(piece, _unflatten_dense_tensors(flat, piece))

    send_in_pieces([tensor.nbytes for tensor in tensors], list(map(bucket_key, tensors)), launch, finish)


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors inside a tensor of a class that wraps others, as quantised ones do; else the tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    return [plain for name in tensor.__tensor_flatten__()[0] for plain in plain_tensors(getattr(tensor, name))]


def send_state(module: nn.Module, group: dist.ProcessGroup, *, source: int = 0, with_buffers: bool) -> None:
    """Overwrite every rank's parameters and buffers of `module`, but the ignored ones, with those of `source`."""
    buffers = synchronized_buffers(module) if with_buffers else {}
    broadcast_coalesced([*synchronized_parameters(module).values(), *buffers.values()], group, source=source)


def _overwrite(tensors: list[Tensor], values: list[Tensor]) -> None:
    """Copy each value into its tensor; elements of an expanded tensor share memory, which is written once."""
    try:
        torch._foreach_copy_(tensors, values)
    except RuntimeError:  # there are expanded, conjugate or negative tensors
        for tensor, value in zip(tensors, values, strict=True):
            once = tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())
            tensor[once].copy_(value[once])


# Buffers in each forward pass


def are_due(ddp: "DataParallel") -> bool:
    """Whether the next synchronised forward pass sends buffers."""
    return ddp.require_forward_param_sync and ddp.forward_sync_buffers and ddp._has_buffers


def send_buffers_if_due(ddp: "DataParallel", *, after_forward: bool, candidate: bool = True) -> None:
    """Send the buffers if that is due at this place, before or after the module runs."""
    hook = vars(ddp).get("buffer_hook")  # `getattr` would find the module's, in subclasses that pass names through
    hooked_after = hook is not None and hook.buffer_comm_hook_location == _BufferCommHookLocation.POST_FORWARD
    if are_due(ddp) and hooked_after == after_forward:
        send_buffers(ddp, candidate=candidate)


def send_buffers(ddp: "DataParallel", *, candidate: bool = True) -> None:
    """Broadcast buffers of rank 0 or, under Join, of the highest candidate with inputs; or call the buffer hook."""
    source = ddp._find_common_rank(ddp.process_group.rank(), candidate) if ddp._join_config.enable else 0
    named = synchronized_buffers(ddp.module)
    # The graph of an earlier forward pass may have saved a buffer; its backward pass must still be allowed.
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(named.values())):
        if (hook := vars(ddp).get("buffer_hook")) is None:
            broadcast_coalesced(list(named.values()), ddp.process_group, source=source)
        else:  # returns None, or futures that the backward pass waits for
            ddp._reducer.after_backward += hook.buffer_comm_hook(hook.buffer_comm_hook_state, named) or []
