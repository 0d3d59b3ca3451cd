"""Rank functions of tutorials 2 and 3: emulated GPUs that train by the clock, over a modelled network."""

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ddplab.calibration.repeated_timing import meet, of_slowest_rank
from ddplab.conformance.class_under_test import FINISHING, Subject
from ddplab.emulation.emulated_device import EmulatedTraining
from ddplab.emulation.wall_clock_network import modelled_network
from reference.launch import let_network_threads_yield
from reference.trace import Trace
from simulator import Fabric

from .own_code import forget


class Candidate(NamedTuple):
    """A data-parallel class to time.

    Attributes:
        name: `module:class`. If the class has a method `average_gradients`, it is called after each backward pass.
        arguments: Arguments of the class.
    """

    name: str
    arguments: Mapping[str, Any] = {}


def iteration_ms(
    rank: int,
    _world_size: int,
    trace: Trace,
    fabric: Fabric,
    candidates: Sequence[Candidate],
    warm_up: int = 2,
    measured: int = 2,
) -> list[list[float]]:
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
        By candidate, the milliseconds of every measured iteration, from one slowest rank's end to the next. A busy
        machine only delays, so the fastest iteration is closest to that of real GPUs.
    """
    forget()
    with modelled_network(fabric):
        let_network_threads_yield()
        return [_iteration_ms(EmulatedTraining(trace, rank), one, warm_up, measured) for one in candidates]


def _iteration_ms(training: EmulatedTraining, candidate: Candidate, warm_up: int, measured: int) -> list[float]:
    optimizer = training.optimizer()
    ddp = Subject(candidate.name).make(training.model, **candidate.arguments)
    finish = next((getattr(ddp, name) for name in FINISHING if hasattr(ddp, name)), lambda: None)
    ends_ns = []
    meet()
    for _ in range(warm_up + measured):
        training(ddp).backward()
        finish()
        optimizer.step()
        optimizer.zero_grad()
        ends_ns.append(time.monotonic_ns())
    last_ends_ns = of_slowest_rank(ends_ns[warm_up - 1 :])
    return [(end - start) / 1e6 for start, end in pairwise(last_ends_ns)]
