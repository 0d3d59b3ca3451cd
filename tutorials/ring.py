"""Rings of tutorial 0: all-reduce on arrays of NumPy, the same on ranks that send with torch, and pictures of it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from ddplab.simulator import plot_colours

from .plots import log_ticks, mark_guess, new_axes

Array = NDArray[Any]
Chunks = list[list[Array]]
"""By rank, the chunks of its array by number."""


def cut(arrays: Sequence[Array]) -> Chunks:
    """Cut each rank's array into as many chunks as there are ranks."""
    return [list(np.array_split(array.copy(), len(arrays))) for array in arrays]


def reduce_scatter(chunks: Chunks) -> Iterator[int]:
    """Run the first half of the ring in place; yields the numbers that a rank has sent after each step."""
    n = len(chunks)
    for step in range(n - 1):
        in_flight = [chunks[rank][(rank - step) % n].copy() for rank in range(n)]
        for rank in range(n):
            left = (rank - 1) % n
            chunks[rank][(left - step) % n] += in_flight[left]
        yield len(in_flight[0])


def all_gather(chunks: Chunks) -> Iterator[int]:
    """Run the second half in place, as `reduce_scatter`; rank r has the sum of chunk r + 1 at first."""
    n = len(chunks)
    for step in range(n - 1):
        in_flight = [chunks[rank][(rank + 1 - step) % n].copy() for rank in range(n)]
        for rank in range(n):
            left = (rank - 1) % n
            chunks[rank][(left + 1 - step) % n] = in_flight[left]
        yield len(in_flight[0])


def all_reduce(arrays: Sequence[Array]) -> tuple[list[Array], int]:
    """All-reduce arrays, one a rank.

    Returns:
        All arrays at the start and after each step; how many numbers each rank sent.
    """
    chunks, sent = cut(arrays), 0
    states = [np.array(arrays)]
    for half in (reduce_scatter, all_gather):
        for numbers in half(chunks):
            sent += numbers
            states.append(np.array([np.concatenate(of_rank) for of_rank in chunks]))
    return states, sent


def draw_states(states: Sequence[Array]) -> Figure:
    """Draw the arrays of all ranks at the start and after each step; a number is a count of contributions."""
    n = len(states[0])
    figure, axes = plt.subplots(1, len(states), figsize=(1.45 * len(states), 1.9), layout="constrained")
    for step, (ax, state) in enumerate(zip(axes, states, strict=True)):
        ax.imshow(state, cmap="Blues", vmin=0, vmax=n)
        for (rank, number), count in np.ndenumerate(state):
            ax.text(number, rank, count, ha="center", va="center", color="white" if count == n else "black")
        ax.set_xticks(range(n))
        ax.set_yticks(range(n), [f"rank {rank}" for rank in range(n)] if step == 0 else [])
        ax.set_title("start" if step == 0 else f"{'add' if step < n else 'replace'} {step}", fontsize=9)
        ax.set_xlabel("chunk", fontsize=9)
    return figure


def draw_sent(sent_mb: Mapping[int, float], guesses_mb: Mapping[int, float | None]) -> Axes:
    """Draw the MB that each rank sends for 100 MB, by number of ranks, with the learner's guesses."""
    ax = new_axes(7, 2.6)
    ax.plot(list(sent_mb), list(sent_mb.values()), "o-", color=plot_colours.COMPUTATION)
    log_ticks(ax, list(sent_mb)).set_ylim(0, 400)
    ax.set_xlabel("ranks")
    ax.set_ylabel("MB that each rank sends")
    for ranks, guess in guesses_mb.items():
        mark_guess(ax, guess, "MB", x=ranks)
    return ax


def all_reduce_by_sending(array: Tensor) -> None:
    """Add up a tensor over all ranks, in place, with messages between neighbours."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = array.tensor_split(n)
    for step in range(2 * (n - 1)):
        arriving = chunks[(rank - 1 - step) % n]
        received = torch.empty_like(arriving)
        sending = dist.isend(chunks[(rank - step) % n], (rank + 1) % n)
        dist.recv(received, (rank - 1) % n)
        assert sending is not None
        sending.wait()
        arriving.copy_(arriving + received if step < n - 1 else received)


def compare(rank: int, _world_size: int, length: int) -> bool:
    """Whether this ring and torch's all-reduce give the same sum of integers, on this rank."""
    ours = torch.arange(length) * (rank + 1)
    theirs = ours.clone()
    all_reduce_by_sending(ours)
    dist.all_reduce(theirs)
    return torch.equal(ours, theirs)
