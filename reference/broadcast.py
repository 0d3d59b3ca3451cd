"""Broadcast of parameters and buffers from one rank to all, in large pieces."""

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from .bucketing import MIB, assign_buckets

PIECE_BYTES = 250 * MIB
"""Size of a piece (torch: `broadcast_bucket_size`)."""
MAX_IN_FLIGHT = 2
"""Pieces that are sent at the same time; bounds the memory of the flat copies, whatever the model's size."""


def broadcast_coalesced(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, *, source: int = 0, piece_bytes: int = PIECE_BYTES
) -> None:
    """Overwrite `tensors` on every rank with those of `source`, a rank within the group.

    Expanded tensors, conjugate and negative views are written through to the memory that they show.
    Tensors of one dtype and device are flattened into pieces of about `piece_bytes`; at most two pieces are
    in flight. Blocks until all pieces have arrived.
    """
    in_flight: deque[_Piece] = deque()
    pieces = assign_buckets(
        [tensor.nbytes for tensor in tensors],
        [piece_bytes],
        keys=[(tensor.dtype, tensor.device) for tensor in tensors],
    )
    for indices in pieces:
        if len(in_flight) == MAX_IN_FLIGHT:
            in_flight.popleft().finish()
        in_flight.append(_Piece([tensors[index] for index in indices], group, source))
    while in_flight:
        in_flight.popleft().finish()


class _Piece:
    """Tensors of one dtype and device that are sent as one flat tensor."""

    def __init__(self, tensors: list[Tensor], group: dist.ProcessGroup, source: int) -> None:
        self._tensors = tensors
        self._is_source = dist.get_rank(group) == source
        self._flat = self._flatten() if self._is_source else self._empty()
        self._work = dist.broadcast(self._flat, group_src=source, group=group, async_op=True)

    def _flatten(self) -> Tensor:
        flat: Tensor = _flatten_dense_tensors([tensor.detach() for tensor in self._tensors])
        return flat.resolve_conj().resolve_neg()  # collectives send memory, which is not conjugate or negative yet

    def _empty(self) -> Tensor:
        first = self._tensors[0]
        return torch.empty(sum(t.numel() for t in self._tensors), dtype=first.dtype, device=first.device)

    def finish(self) -> None:
        self._work.wait()
        if not self._is_source:
            with torch.no_grad():
                _overwrite(self._tensors, _unflatten_dense_tensors(self._flat, self._tensors))


def _overwrite(tensors: list[Tensor], values: list[Tensor]) -> None:
    """Copy each value into its tensor; elements of an expanded tensor share memory, which is written once."""
    try:
        torch._foreach_copy_(tensors, values)
    except RuntimeError:  # there are expanded, conjugate or negative tensors
        for tensor, value in zip(tensors, values, strict=True):
            into = tensor
            for dimension, stride in enumerate(tensor.stride()):
                if stride == 0 and tensor.size(dimension) > 1:
                    into, value = into.narrow(dimension, 0, 1), value.narrow(dimension, 0, 1)
            into.copy_(value)
