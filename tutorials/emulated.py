"""Rank function of tutorial 3: emulated GPUs that train by the clock, over a modelled network."""

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from ddplab.calibration.repeated_timing import meet, of_slowest_rank
from ddplab.conformance.class_under_test import FINISHING, Subject
from ddplab.emulation.emulated_device import EmulatedTraining
from reference.launch import let_network_threads_yield
from reference.trace import Trace
from simulator import Fabric

from .own_code import forget
from .wall_clock_network import WallGroup, modelled_network


class Candidate(NamedTuple):
    """A data-parallel class to time.

    Attributes:
        name: `module:class`. If the class has a method `average_gradients`, it is called after each backward pass.
        arguments: Arguments of the class.
    """

    name: str
    arguments: Mapping[str, Any] = {}


LATE_AT_MOST = 0.03
"""Largest lateness of sleeps and collectives, as a fraction of an iteration, at which a measurement counts."""


class Timed(NamedTuple):
    """Measured iterations of one candidate, equal on all ranks.

    Attributes:
        ms: Milliseconds of every measured iteration, from one slowest rank's end to the next. A busy machine only
            delays, so the fastest iteration is closest to that of real GPUs.
        late_ms: How late sleeps or collectives ended after their deadlines on the slowest rank: 90 % quantile.
    """

    ms: tuple[float, ...]
    late_ms: float

    @property
    def keeps_up(self) -> bool:
        """Whether the machine kept up with the emulated GPUs; if not, it is too busy, and the times are too long."""
        return self.late_ms <= LATE_AT_MOST * min(self.ms)


def iteration_ms(
    rank: int,
    _world_size: int,
    trace: Trace,
    fabric: Fabric,
    candidates: Sequence[Candidate],
    warm_up: int = 2,
    measured: int = 2,
) -> list[Timed]:
    """Train emulated GPUs with one candidate after the other.

    A GPU sleeps for the recorded times instead of computing. Gloo moves the gradients, and each collective takes the
    time that the fabric gives. Autograd, its hooks, buckets and copies are real. Copies during the backward pass cost
    the sleeping GPU no time.

    Args:
        rank: This rank.
        trace: Times of the GPU.
        fabric: Costs of collectives.
        candidates: The classes.
        warm_up: Iterations before those that count; two if a class rebuilds its buckets.
        measured: Iterations that count.

    Returns:
        The times of each candidate.
    """
    forget()
    with modelled_network(fabric):
        let_network_threads_yield()
        return [_iteration_ms(EmulatedTraining(trace, rank), one, warm_up, measured) for one in candidates]


def _iteration_ms(training: EmulatedTraining, candidate: Candidate, warm_up: int, measured: int) -> Timed:
    optimizer = training.optimizer()
    ddp = Subject(candidate.name).make(training.model, **candidate.arguments)
    finish = next((getattr(ddp, name) for name in FINISHING if hasattr(ddp, name)), lambda: None)
    slept_late_ns = training.observer.overslept_ns
    network: Any = dist.group.WORLD
    assert isinstance(network, WallGroup)
    ends_ns = []
    meet()
    for number in range(warm_up + measured):
        if number == warm_up:
            slept_late_ns.clear()
            network.late_ns.clear()
        training(ddp).backward()
        finish()
        optimizer.step()
        optimizer.zero_grad()
        ends_ns.append(time.monotonic_ns())
    late_ns = [round(np.quantile(late or [0], 0.9)) for late in (slept_late_ns, network.late_ns)]
    *last_ends_ns, late_ns_of_slowest = of_slowest_rank([*ends_ns[warm_up - 1 :], max(late_ns)])
    return Timed(tuple((end - start) / 1e6 for start, end in pairwise(last_ends_ns)), late_ns_of_slowest / 1e6)
