"""Rank bodies of test_broadcast.py."""

import functools

import torch
import torch.distributed as dist

from reference.broadcast import broadcast_coalesced

from ..scenarios import ODD_BUFFERS


@functools.cache
def three_of_four() -> dist.ProcessGroup:
    """A group without rank 0; made once."""
    return dist.new_group([1, 2, 3])


def broadcast_odd_tensors(rank: int, _world_size: int, kinds: list[str], source: int, piece_bytes: int) -> list:
    """Tensors of each rank of a group after a broadcast from one of them, and those that it had before."""
    group = three_of_four()
    if rank == 0:
        return []
    tensors, sent = (
        [ODD_BUFFERS[kind](torch.arange(24.0) * (number + 1) * of) for number, kind in enumerate(kinds)]
        for of in (rank, source + 1)
    )
    broadcast_coalesced(tensors, group, source=source, piece_bytes=piece_bytes)
    return [
        ([*tensor.resolve_conj().tolist()], [*was.resolve_conj().tolist()])
        for tensor, was in zip(tensors, sent, strict=True)
    ]
