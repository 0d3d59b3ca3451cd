"""Our DistributedDataParallel beside torch's: iteration times in pairs, interleaved, on two Gloo ranks."""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from reference import models
from reference.data_parallel import DistributedDataParallel
from reference.launch import run_ranks

WARM_UP = 3  # the rebuild, and the first touch of every buffer


def iteration_pairs(_rank: int, _world_size: int, name: str, pairs: int) -> list[tuple[float, float]]:
    """Seconds of one iteration under ours and under torch's, `pairs` times, the order swapped each time."""
    contenders = []
    for wrapper in (DistributedDataParallel, TorchDDP):
        torch.manual_seed(0)
        module, loss_fn = models.build(name)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        contenders.append((wrapper(module), loss_fn, optimizer))

    def iterate(contender) -> float:
        ddp, loss_fn, optimizer = contender
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss_fn(ddp).backward()
        optimizer.step()
        return time.perf_counter() - start

    times = []
    for number in range(WARM_UP + pairs):
        swap = number % 2
        measured = [iterate(contender) for contender in contenders[:: -1 if swap else 1]]
        times.append((measured[swap], measured[1 - swap]))
    return times[WARM_UP:]


def main() -> None:
    """Print one line a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet50", "mlp"])
    parser.add_argument("--pairs", type=int, default=20)
    arguments = parser.parse_args()
    print(f"{'model':12} {'ours ms':>9} {'torch ms':>9} {'ours/torch: median':>19} {'quartiles':>15} {'pairs':>6}")
    for name in arguments.models:
        pairs = run_ranks(iteration_pairs, 2, name, arguments.pairs)[0]
        ours, torchs = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
        low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
        print(f"{name:12} {ours:9.1f} {torchs:9.1f} {middle:19.3f} {low:7.3f}-{high:.3f} {len(pairs):6}")


if __name__ == "__main__":
    main()
