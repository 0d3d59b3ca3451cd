"""Iteration time and peak memory of our DistributedDataParallel and of torch's, in pairs, on ranks with Gloo."""

import argparse
import ctypes
import resource
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddplab import models
from reference.data_parallel import DistributedDataParallel
from reference.launch import run_ranks, world_size_or
from reference.launcher import on_rank_0

from .pairs import Pairs, header, row, time_pairs

WRAPPERS: dict[str, type[nn.Module]] = {"ours": DistributedDataParallel, "torch": TorchDDP}
MODES: dict[str, dict[str, Any]] = {
    "": {},
    "+view": {"gradient_as_bucket_view": True},
    "+batched": {"batched_grad_copy": True},
}
MEMORY_ITERATIONS = 5


def compare(model: str, mode: str, pairs: int) -> Pairs:
    """Time iterations of ours and of torch's, half of them in processes that build torch's first.

    The position of the tensors in memory alone can make an iteration one or two percent longer.
    """
    half = -(-pairs // 2)
    return [
        pair
        for first in WRAPPERS
        for pair in run_ranks(compare_in_order, world_size_or(2), model, mode, half, first)[0]
    ]


def compare_in_order(_rank: int, _world_size: int, model: str, mode: str, pairs: int, first: str) -> Pairs:
    """Time iterations of ours and of torch's; the wrapper named `first` is built first."""
    built = {
        name: trainer(model, partial(WRAPPERS[name], **MODES[mode])) for name in sorted(WRAPPERS, key=first.__ne__)
    }
    return time_pairs(*(built[name] for name in WRAPPERS), pairs)


def peak_memory(_rank: int, _world_size: int, model: str, mode: str, wrapper: str) -> int:
    """Bytes by which the peak memory of this rank's process exceeds that of the built model."""
    _return_freed_memory()
    built: list[int] = []

    def wrap(module: nn.Module) -> nn.Module:
        built.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return WRAPPERS[wrapper](module, **MODES[mode])

    iterate = trainer(model, wrap)
    for _ in range(MEMORY_ITERATIONS):
        iterate()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - built[0]) * 1024


def _return_freed_memory() -> None:
    """Make glibc map each large tensor separately, so that the peak does not include holes in the heap.

    Undoes what the launcher sets for steady times; see `reference.launch.keep_freed_memory`.
    """
    m_mmap_threshold, m_mmap_max = -3, -4
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(m_mmap_max, 65536)  # glibc's default
    mallopt(m_mmap_threshold, 64 * 1024)


def trainer(model: str, wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
    """Build and wrap a model; return a function that runs one training iteration."""
    torch.manual_seed(0)
    module, loss_fn = models.build(model)
    wrapped = wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def iterate() -> None:
        optimizer.zero_grad()
        loss_fn(wrapped).backward()
        optimizer.step()

    return iterate


def main() -> None:
    """Print one line for each model and mode, then the peak memory of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["small-tensors", "resnet50", "transformer", "mlp"])
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=["", "+view"])
    parser.add_argument("--pairs", type=int, default=30)
    arguments = parser.parse_args()
    rows = [(model, mode) for model in arguments.models for mode in arguments.modes]
    print(__doc__)
    print(header("ours", "torch"))
    for model, mode in rows:
        print(row(model + mode, compare(model, mode, arguments.pairs)), flush=True)
    print(f"\n{'peak MiB':22} {'ours':>10} {'torch':>10} {'ours/torch':>11}")
    for model, mode in rows:
        ours, torchs = (
            max(run_ranks(peak_memory, world_size_or(2), model, mode, wrapper)) / 2**20 for wrapper in WRAPPERS
        )
        print(f"{model + mode:22} {ours:10.1f} {torchs:10.1f} {ours / torchs:11.3f}", flush=True)


if __name__ == "__main__":
    on_rank_0(main)
