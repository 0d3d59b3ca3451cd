"""Measured times that a notebook prints: the least of two rounds, and whether the rounds agree.

Other work on the machine only delays, so the least time is closest to that of an idle machine. If two rounds, some
seconds apart, disagree, the notebook says that the machine is too busy instead of printing a number as a fact. Rounds
also agree if other work is steady, so times of ranks count only if each rank had a core for itself.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ddplab import RankPool

TOLERANCE = 0.25
"""Largest difference of two rounds, as a fraction of the shorter one, at which a time counts as repeatable."""
ATTEMPTS = 3
"""Rounds after which the machine counts as too busy."""


CORE_SHARE = 0.9
"""Smallest share of a core that each rank must get; on a busy machine ranks wait for a core."""
PROBE_NS = 200_000_000


def core_share(_rank: int, _world_size: int) -> float:
    """Compute for `PROBE_NS` on each rank, and return the part of the time in which the rank had a core."""
    start_ns, computed_ns = time.perf_counter_ns(), time.thread_time_ns()
    while (passed_ns := time.perf_counter_ns() - start_ns) < PROBE_NS:
        pass
    return (time.thread_time_ns() - computed_ns) / passed_ns


class Least(NamedTuple):
    """A measured time.

    Attributes:
        ms: Milliseconds, the least of all rounds.
        next_ms: Milliseconds of the second fastest round.
        share: Share of a core that each rank got in at least two rounds; 1 if it was not measured.
    """

    ms: float
    next_ms: float
    share: float = 1.0

    @property
    def repeats(self) -> bool:
        """Whether the two fastest rounds agree, and ranks did not wait for a core."""
        return self.next_ms <= (1 + TOLERANCE) * self.ms and self.share >= CORE_SHARE

    def __str__(self) -> str:
        """The time, or that there is none."""
        if self.repeats:
            return f"{self.ms:.3g} ms"
        share = f", with {self.share:.0%} of a core each" if self.share < CORE_SHARE else ""
        return f"{self.ms:.3g} ms once and {self.next_ms:.3g} ms again{share}: this machine is too busy to measure it"


def least(measure: Callable[[], Sequence[float]], pool: RankPool | None = None) -> list[Least]:
    """Measure at least two rounds, and up to `ATTEMPTS` until all times repeat.

    Args:
        measure: Runs one round; returns the milliseconds of each thing that it measures, in a fixed order.
        pool: Ranks whose share of a core is measured after each round. None: the times are processor times.
    """
    rounds: list[Sequence[float]] = []
    shares: list[float] = []
    found: list[Least] = []
    while len(rounds) < ATTEMPTS and not (found and all(one.repeats for one in found)):
        rounds.append(measure())
        shares.append(min(pool.run(core_share)) if pool else 1.0)
        if len(rounds) > 1:
            by_time = [sorted(times) for times in zip(*rounds, strict=True)]
            found = [Least(fastest, second, sorted(shares)[-2]) for fastest, second, *_ in by_time]
    return found
