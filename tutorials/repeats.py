"""Measured times that a notebook prints: the least of two rounds, and whether the rounds agree.

Other work on the machine only delays, so the least time is closest to that of an idle machine. If two rounds, some
seconds apart, disagree, the notebook says that the machine is too busy instead of printing a number as a fact.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

TOLERANCE = 0.25
"""Largest difference of two rounds, as a fraction of the shorter one, at which a time counts as repeatable."""
ATTEMPTS = 4
"""Rounds after which the machine counts as too busy."""


class Least(NamedTuple):
    """A measured time.

    Attributes:
        ms: Milliseconds, the least of all rounds.
        next_ms: Milliseconds of the second fastest round.
    """

    ms: float
    next_ms: float

    @property
    def repeats(self) -> bool:
        """Whether the two fastest rounds agree."""
        return self.next_ms <= (1 + TOLERANCE) * self.ms

    def __str__(self) -> str:
        """The time, or that there is none."""
        if self.repeats:
            return f"{self.ms:.3g} ms"
        return f"{self.ms:.3g} ms once and {self.next_ms:.3g} ms again: this machine is too busy to measure it"


def least(measure: Callable[[], Sequence[float]]) -> list[Least]:
    """Measure at least two rounds, and up to `ATTEMPTS` until all times repeat.

    Args:
        measure: Runs one round; returns the milliseconds of each thing that it measures, in a fixed order.
    """
    rounds = [measure()]
    while len(rounds) < ATTEMPTS:
        rounds.append(measure())
        found = [Least(*sorted(times)[:2]) for times in zip(*rounds, strict=True)]
        if all(one.repeats for one in found):
            break
    return found
