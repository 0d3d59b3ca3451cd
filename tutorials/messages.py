"""Rank function of tutorial 0: the same bytes in few and in many messages."""

import time

import torch
import torch.distributed as dist


def time_in_pieces(_rank: int, _world_size: int, total_bytes: int, piece_bytes: int, repeats: int) -> list[int]:
    """Nanoseconds of each repetition to all-reduce `total_bytes` in messages of `piece_bytes`, all issued at once."""
    pieces = torch.ones(total_bytes // 4).split(piece_bytes // 4)
    times_ns = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter_ns()
        handles = [dist.all_reduce(piece, async_op=True) for piece in pieces]
        for handle in handles:
            handle.wait()
        times_ns.append(time.perf_counter_ns() - start)
    return times_ns[1:]  # the first repetition touches the memory for the first time
