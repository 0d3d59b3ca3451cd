"""Rank bodies of test_reducer_observer.py."""

import torch
from torch import nn

from reference.data_parallel import DistributedDataParallel
from reference.reducer_observer import Observer

CALLBACKS = [name for name, value in vars(Observer).items() if callable(value)]


class Log(Observer):
    """Keeps the name and the bucket or parameter of each call."""

    def __init__(self, watches_parameters):
        self.watches_parameters, self.calls = watches_parameters, []


def _logged(name):
    def callback(self, number=None, _future=None):
        self.calls.append((name, number))

    return callback


for name in CALLBACKS:
    setattr(Log, name, _logged(name))


def calls_by_iteration(_rank, _world_size, watches_parameters, layers, bucket_cap_mb):
    """By synchronised iteration, an observer's calls and the number of buckets; then its calls under `no_sync`."""
    ddp = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(layers))), bucket_cap_mb=bucket_cap_mb
    )
    ddp.reducer.observers.append(log := Log(watches_parameters))
    iterations = []
    for _ in range(3):
        ddp(torch.ones(1, 4)).sum().backward()
        iterations.append((log.calls, len(ddp.reducer.buckets)))
        log.calls = []
    with ddp.no_sync():
        ddp(torch.ones(1, 4)).sum().backward()
    return iterations, log.calls
