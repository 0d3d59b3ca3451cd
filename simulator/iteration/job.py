"""Job: one iteration in plain numbers, which is all that an engine is given."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..fabric import Slowdowns
from .script import Script

Nanoseconds = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """An iteration to simulate.

    Ranks that do the same at the same moments are simulated once, however many they are.

    Attributes:
        script: What every rank does.
        work_ns: How long each computing step takes at full speed; shape [ranks, steps of the script], or with further
            axes before those, one job each, where only the closed form is asked.
        ranks: The number of each simulated rank.
        does_as: For every rank the number of the simulated one that does the same; shape [world size]. None: there
            are no others.
        cost_ns: Each collective when it has the fabric to itself; shape [collectives], or with axes before.
        queues: The process group of each collective; those of one group start in their order.
        concurrency: Collectives of one group that run at the same time.
        sharing: By collective, how many times as long it takes with one other beside it; each further adds as much.
        slowdowns: How many times as long computing takes while collectives run, and they while a rank computes;
            of several that run, computing feels the mean. None: neither feels the other.
        lingers_ns: How long computing feels the last collective once that is done, if no other follows before.
    """

    script: Script
    work_ns: Nanoseconds
    ranks: tuple[int, ...]
    does_as: NDArray[np.int64] | None = None
    cost_ns: Nanoseconds
    queues: tuple[int, ...]
    concurrency: int = 1
    sharing: tuple[float, ...]
    slowdowns: Slowdowns | None = None
    lingers_ns: int = 0

    def alike(self) -> dict[int, list[int]]:
        """Which ranks do as each of the simulated ones does, itself among them."""
        if self.does_as is None:
            return {rank: [rank] for rank in self.ranks}
        alike: dict[int, list[int]] = {rank: [] for rank in self.ranks}
        for rank, simulated in enumerate(self.does_as.tolist()):
            alike[simulated].append(rank)
        return alike

    @property
    def is_fluid(self) -> bool:
        """Whether speeds depend on what else runs."""
        return self.slowdowns is not None or (self.most_running > 1 and max(self.sharing, default=1.0) > 1)

    @property
    def most_running(self) -> int:
        """Collectives that can run at the same time."""
        return self.concurrency * len(set(self.queues))
