"""Model of tutorial 8, for `--model tutorials.replaying:convnet`, and a trace with a slower rank."""

import torch
from torch import nn

from reference.models import Model
from reference.trace import Iteration, RankTrace, Trace

CHANNELS, BATCH, SIDE = (32, 64, 128, 256), 4, 32
WIDTH, LAYERS, CLASSES = 1024, 5, 100


def convnet() -> Model:
    """Build a network whose largest gradients are ready first: four convolutions, then matrices of 4 MiB each."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in CHANNELS:
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        inputs = outputs
    layers += [nn.Flatten(), nn.Linear(inputs * (SIDE // 2 ** len(CHANNELS)) ** 2, WIDTH), nn.ReLU()]
    for _ in range(LAYERS - 1):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    layers.append(nn.Linear(WIDTH, CLASSES))
    images, labels = torch.randn(BATCH, 3, SIDE, SIDE), torch.randint(CLASSES, (BATCH,))
    return nn.Sequential(*layers), lambda module: nn.functional.cross_entropy(module(images), labels)


def with_slower_rank(trace: Trace, rank: int, factor: float) -> Trace:
    """A copy of the trace in which all durations of one rank are `factor` times as long."""
    slower = tuple(_scaled(of_rank, factor) if of_rank.rank == rank else of_rank for of_rank in trace.ranks)
    return trace.model_copy(update={"ranks": slower})


def _scaled(of_rank: RankTrace, factor: float) -> RankTrace:
    first_ns = of_rank.iterations[0].forward_start_ns

    def later(ns: int | None) -> int | None:
        return None if ns is None else first_ns + round(factor * (ns - first_ns))

    def scaled(iteration: Iteration) -> Iteration:
        times = {name: later(ns) for name, ns in iteration if name.endswith("_ns") and name != "ready_ns"}
        return iteration.model_copy(update={**times, "ready_ns": tuple(map(later, iteration.ready_ns))})

    return of_rank.model_copy(update={"iterations": tuple(map(scaled, of_rank.iterations))})
