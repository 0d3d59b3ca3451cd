"""Conditions under which a measurement on emulated devices is valid: the machine keeps up with them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reference.errors import Error

IDLE_AT_LEAST = 0.3
"""Smallest fraction of the processor that must be idle: with less, threads wait for a core."""
OVERSLEPT_AT_MOST = 0.01
"""Largest 99 % quantile of oversleeping, and largest lateness of collectives, as a fraction of the shortest measured
iteration."""
SLOW_DOWN_AT_MOST = 1.02
"""Largest slow-down of the device by the network, and of the network by the device."""


class ConditionsError(Error, RuntimeError):
    """The machine is too slow for the emulated devices, so that a measurement would not be valid."""


@dataclass(frozen=True)
class Conditions:
    """Whether emulated devices ran as they should, on all ranks and in all measured iterations, in real nanoseconds.

    Attributes:
        idle: Fraction of the machine's processor time in which it was idle; the least of all turns.
        overslept_ns: How late sleeps ended: 50 %, 90 % and 99 % quantile.
        late_ns: How late collectives of a modelled network ended: the largest median of a turn. 0 on a real network.
        shortest_ns: Shortest measured iteration.
        device_slow_down: Factor by which all-reduces slow passes of the device down.
        network_slow_down: Factor by which passes of the device slow all-reduces down.
        host_ns: By how much the work of the host prolongs an iteration; predictions contain it.
    """

    idle: float
    overslept_ns: tuple[int, int, int]
    late_ns: int
    shortest_ns: int
    device_slow_down: float
    network_slow_down: float
    host_ns: int

    def check(self) -> None:
        """Raise a `ConditionsError` that names each condition that does not hold."""
        problems = []
        if self.idle < IDLE_AT_LEAST:
            problems.append(f"at least {IDLE_AT_LEAST:.0%} of the processor idle, got {self.idle:.0%}")
        within = f"within {OVERSLEPT_AT_MOST:.0%} of the shortest iteration ({self.shortest_ns / 1e6:.1f} ms)"
        for what, due, late_ns in (
            ("99 of 100 sleeps", "deadline", self.overslept_ns[-1]),
            ("collectives of the modelled network", "moment", self.late_ns),
        ):
            if late_ns > OVERSLEPT_AT_MOST * self.shortest_ns:
                problems.append(f"{what} to end {within} after their {due}, got {late_ns / 1e6:.2f} ms")
        _refuse([*problems, *_slow_down_problems(self.device_slow_down, self.network_slow_down)])


SLOW_DOWN_CHECKS = 3
"""Measurements of the slow-downs, of which one must be within the limit: other work on the machine, which comes in
bursts, looks like a slow-down."""


def checked_slow_downs(measure: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """Check, before anything is trained, that device and network do not slow each other down; see `Conditions`.

    `measure` returns the slow-downs of device and network. If they are too large in every measurement, raises a
    `ConditionsError`.
    """
    for _ in range(SLOW_DOWN_CHECKS):
        slow_downs = measure()
        problems = _slow_down_problems(*slow_downs)
        if not problems:
            break
    _refuse(problems)
    return slow_downs


def _slow_down_problems(device: float, network: float) -> list[str]:
    return [
        f"the {what} to be slowed down by at most {SLOW_DOWN_AT_MOST}, got {factor:.3f}"
        for what, factor in (("device", device), ("network", network))
        if factor > SLOW_DOWN_AT_MOST
    ]


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise ConditionsError(
            f"emulated devices: expected {'; '.join(problems)}. This machine is too slow or too busy for these "
            "ranks, so nothing is reported; try a larger --dilation or a smaller --byte-scale"
        )
