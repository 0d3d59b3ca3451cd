"""Record two modules under torch's data parallelism, the recordings overlapping; prints nothing."""

from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddplab.reference.recorder import record


def main() -> None:
    """Every iteration of both recordings must have its bucket."""
    modules = [DistributedDataParallel(nn.Linear(2, 1)) for _ in range(2)]
    first, second = map(record, modules)
    first.__enter__()
    train(modules)
    second.__enter__()
    train(modules)
    first.__exit__(None, None, None)
    train(modules)
    second.__exit__(None, None, None)
    for recording in (first, second):
        buckets = [len(iteration.buckets) for iteration in recording.trace.ranks[0].iterations]
        assert buckets == [1] * 6, buckets


def train(modules: list[DistributedDataParallel]) -> None:
    for _ in range(3):
        for module in modules:
            module(torch.ones(1, 2)).sum().backward()


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        main()
        dist.destroy_process_group()
