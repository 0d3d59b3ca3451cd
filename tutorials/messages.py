"""Messages of tutorial 0: the time of the same bytes in few and in many messages, and a picture of times by size."""

import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from matplotlib.axes import Axes

from ddplab.simulator import plot_colours

from .plots import mark_guess, new_axes


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


def draw_times(here_ms: Mapping[int, float], nccl_ms: Mapping[int, float], guess_times_as_long: float | None) -> Axes:
    """Draw milliseconds of all-reduces by their bytes, of Gloo here and published ones of NCCL.

    Args:
        here_ms: Of Gloo, by bytes; contains 4 KiB.
        nccl_ms: Of NCCL, by bytes.
        guess_times_as_long: The learner's guess for 4 MiB, as a multiple of the time for 4 KiB.
    """
    ax = new_axes(7, 3.6)
    for label, curve, style, colour in (
        ("Gloo, 2 ranks, here", here_ms, "o-", plot_colours.EXPOSED),
        ("NCCL, 16 A100, published", nccl_ms, "s-", plot_colours.COMPUTATION),
    ):
        ax.loglog([size / 1024 for size in curve], list(curve.values()), style, color=colour, label=label)
    ax.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)  # above, where no curve comes
    ax.set_xlabel("bytes of the array, KiB")
    ax.set_ylabel("all-reduce, ms")
    mark_guess(ax, guess_times_as_long, "times", x=4096, scale=here_ms[4096])  # 4,096 KiB, and 4,096 bytes
    return ax
