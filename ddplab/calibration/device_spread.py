"""Measures how much devices of one kind differ in speed, and how much the iterations of one device vary."""

from collections.abc import Sequence
from statistics import fmean, median, pstdev
from typing import NamedTuple

from .. import models
from .repeated_timing import meet, time_ns

WARM_UP = 3


class DeviceSpread(NamedTuple):
    """Standard deviations as fractions of the mean: of the devices' medians, and of the iterations of one device."""

    between_devices: float
    between_iterations: float


def time_iterations_alone(_rank: int, _world_size: int, model: str, repeats: int) -> list[int]:
    """Return the nanoseconds of each forward and backward pass of this rank; all ranks compute at the same time."""
    module, loss_fn = models.build(model)

    def iterate() -> None:
        loss_fn(module).backward()
        module.zero_grad()

    times_ns = []
    for _ in range(WARM_UP + repeats):
        meet()
        times_ns.append(time_ns(iterate))
    return times_ns[WARM_UP:]


def spread_of(times_by_rank: Sequence[Sequence[int]]) -> DeviceSpread:
    """Summarise the times of all ranks."""
    medians = [median(times_ns) for times_ns in times_by_rank]
    within = fmean(pstdev(times_ns) / fmean(times_ns) for times_ns in times_by_rank)
    return DeviceSpread(pstdev(medians) / fmean(medians), within)
