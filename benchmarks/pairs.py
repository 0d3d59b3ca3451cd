"""Paired timing of actions, which take turns; every other turn runs in reverse order."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddplab.reference.files.writing import write_atomically
from ddplab.reference.launch import default_backend, rank_device, world_size_or

WARM_UP = 3  # the rebuild, and the first touch of every buffer

Pairs = list[tuple[float, ...]]
"""Seconds of the first action, of the second and of those after them, turn by turn."""


def arguments(description: str | None, *models: str) -> argparse.ArgumentParser:
    """Make a parser with the options that all of these benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--models", nargs="+", default=models)
    parser.add_argument("--world-size", type=int, help="number of ranks (default: 2, or those of the launcher)")
    parser.add_argument("--backend", help="gloo, or nccl, with which ranks train on GPUs (default: nccl where it is)")
    parser.add_argument("--json", type=Path, help="also write all times in seconds to this file, after each row")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, and choose number of ranks and backend if it does not."""
    options = parser.parse_args()
    options.world_size = options.world_size or world_size_or(2)
    options.backend = options.backend or default_backend(options.world_size)
    return options


def save(path: Path | None, rows: Mapping[str, Any]) -> None:
    """Write the rows so far, by name."""
    if path is not None:
        write_atomically(path, json.dumps(rows).encode())


def time_pairs(pairs: int, *actions: Callable[[], None]) -> Pairs:
    """Time all actions in turns on all ranks, so that a slow phase of the machine affects each of them."""
    order = list(range(len(actions)))
    times = []
    for number in range(WARM_UP + pairs):
        measured = dict.fromkeys(order, 0.0)
        for which in order if number % 2 == 0 else order[::-1]:
            measured[which] = time_once(actions[which])
        times.append(tuple(measured.values()))
    return times[WARM_UP:]


def header(first: str, second: str) -> str:
    """Column titles for `row`."""
    ratio = f"{first}/{second}"
    return f"{'model':22} {first + ' ms':>12} {second + ' ms':>12} {ratio:>12} {'quartiles':>13} {'pairs':>6}"


def row(name: str, pairs: Pairs) -> str:
    """One line: medians of the first two actions, median and quartiles of their ratio."""
    a, b, *_ = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
    low, middle, high = statistics.quantiles([first / second for first, second, *_ in pairs], n=4)
    return f"{name:22} {a:12.1f} {b:12.1f} {middle:12.3f} {low:6.3f}-{high:.3f} {len(pairs):6}"


def time_once(action: Callable[[], None]) -> float:
    """Seconds that an action takes on this rank, after a barrier.

    On a GPU, those between two of its events. The action also runs before the first event, so that the host is ahead
    of the GPU, as in steady training.
    """
    dist.barrier()
    if rank_device().type != "cuda":
        start = time.perf_counter()
        action()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    action()
    begin.record()
    action()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
