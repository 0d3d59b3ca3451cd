"""Iteration time and peak memory of our DistributedDataParallel and of torch's, in pairs.

One rank also trains the module itself, in turns with both: what a data-parallel class costs where nothing is sent.
"""

import ctypes
import gc
import resource
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddplab import DistributedDataParallel, RankPool, models
from ddplab.reference.launch import Body, rank_device
from ddplab.reference.ranks.launcher import on_rank_0

from .pairs import Pairs, arguments, header, parse, row, save, time_pairs

WRAPPERS: dict[str, type[nn.Module]] = {"ours": DistributedDataParallel, "torch": TorchDDP}
MODES: dict[str, dict[str, Any]] = {
    "": {},
    "+view": {"gradient_as_bucket_view": True},
    "+batched": {"batched_grad_copy": True},
}
MEMORY_ITERATIONS = 5


class Ranks(RankPool):
    """Ranks that run a body in processes of its own on a CPU; on a GPU, where starting takes longer, in the same."""

    def __call__(self, body: Body, *arguments: Any) -> list[Any]:
        """Run a body; returns the results by rank."""
        results = self.run(body, *arguments)
        if self.backend == "gloo":
            self.close()
        return results


def compare(ranks: Ranks, model: str, mode: str, pairs: int) -> Pairs:
    """Time iterations of ours and of torch's, half of them in processes that build torch's first.

    The position of the tensors in memory alone can make an iteration one or two percent longer.
    """
    half = -(-pairs // 2)
    return [pair for first in WRAPPERS for pair in ranks(compare_in_order, model, mode, half, first)[0]]


def compare_in_order(_rank: int, world_size: int, model: str, mode: str, pairs: int, first: str) -> Pairs:
    """Time iterations of ours and of torch's, and on one rank of the module; the wrapper `first` is built first."""
    built = {
        name: trainer(model, partial(WRAPPERS[name], **MODES[mode])) for name in sorted(WRAPPERS, key=first.__ne__)
    }
    plain = [trainer(model, nn.Sequential)] if world_size == 1 else []
    return time_pairs(pairs, *(built[name] for name in WRAPPERS), *plain)


def peak_memory(_rank: int, _world_size: int, model: str, mode: str, wrapper: str) -> int:
    """Bytes by which the peak memory of this rank, of its GPU or its process, exceeds that of the built model."""
    _return_freed_memory()
    if rank_device().type == "cuda":
        gc.collect()  # the model before
        torch.cuda.reset_peak_memory_stats()
    built: list[int] = []

    def wrap(module: nn.Module) -> nn.Module:
        built.append(_peak_bytes())
        return WRAPPERS[wrapper](module, **MODES[mode])

    iterate = trainer(model, wrap)
    for _ in range(MEMORY_ITERATIONS):
        iterate()
    return _peak_bytes() - built[0]


def _peak_bytes() -> int:
    if rank_device().type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _return_freed_memory() -> None:
    """Make glibc map each large tensor separately, so that the peak does not include holes in the heap.

    Undoes what the launcher sets for steady times; see `ddplab.reference.ranks.process_settings.keep_freed_memory`.
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
    parser = arguments(__doc__, "small-tensors", "resnet50", "transformer", "mlp")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=["", "+view"])
    parser.add_argument("--pairs", type=int, default=30)
    options = parse(parser)
    names = [(model, mode) for model in options.models for mode in options.modes]
    times: dict[str, Pairs] = {}
    peaks: dict[str, list[int]] = {}
    print(__doc__)
    print(header("ours", "torch"))
    ranks = Ranks(options.world_size, backend=options.backend)
    for model, mode in names:
        times[model + mode] = compare(ranks, model, mode, options.pairs)
        save(options.json, {"times": times})
        print(row(model + mode, times[model + mode]), flush=True)
    print(f"\n{'peak MiB':22} {'ours':>10} {'torch':>10} {'ours/torch':>11}")
    for model, mode in names:
        peaks[model + mode] = [max(ranks(peak_memory, model, mode, wrapper)) for wrapper in WRAPPERS]
        save(options.json, {"times": times, "peak_bytes": peaks})
        ours, torchs = (peak / 2**20 for peak in peaks[model + mode])
        print(f"{model + mode:22} {ours:10.1f} {torchs:10.1f} {ours / torchs:11.3f}", flush=True)
    ranks.close()


if __name__ == "__main__":
    on_rank_0(main)
