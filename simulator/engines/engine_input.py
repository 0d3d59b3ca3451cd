"""Engine input: a schedule with the durations of all its steps and collectives, ready to simulate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..fabric import LinkShare
from ..schedule.schedule import Condition, IterationSchedule
from ..workload.compute_times import Floats, Nanoseconds


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInput:
    """An iteration to simulate: a schedule and its durations.

    Of ranks with identical behaviour, only one is simulated.

    Attributes:
        schedule: Steps of every rank.
        duration_ns: Duration of each computing step at full speed; shape [ranks, steps of the schedule]. For the
            closed form there may be more leading axes, for example one for the iterations.
        ranks: The simulated ranks.
        represented_by: For every rank, the simulated rank that behaves the same; shape [world size].
        cost_ns: Duration of each collective while no other collective runs; shape [collectives] or, see `stack`,
            [iterations, collectives].
        concurrency: Collectives that run at the same time; they start in launch order.
        sharing: How each collective shares the link with others that run at the same time.
        slow_down: Factor on the time of computing while any collective runs, or one for each iteration.
        meets: By condition of a `Wait`, whether each rank meets it; shape [ranks] or, for the closed form, the
            leading axes of `duration_ns`.
    """

    schedule: IterationSchedule
    duration_ns: Nanoseconds
    ranks: tuple[int, ...]
    represented_by: NDArray[np.int64]
    cost_ns: Nanoseconds
    concurrency: int = 1
    sharing: tuple[LinkShare, ...]
    slow_down: float | Floats = 1.0
    meets: Mapping[Condition, NDArray[np.bool_]] = field(default_factory=dict)

    @classmethod
    def stack(cls, iterations: Sequence[Self]) -> Self:
        """Combine single iterations, which differ in durations, costs of collectives and slow-downs, into many."""
        duration_ns, cost_ns = (
            np.stack([getattr(one, name) for one in iterations]) for name in ("duration_ns", "cost_ns")
        )
        slow_down = np.array([one.slow_down for one in iterations])
        meets = {only: np.stack([one.meets[only] for one in iterations]) for only in iterations[0].meets}
        return replace(iterations[0], duration_ns=duration_ns, cost_ns=cost_ns, slow_down=slow_down, meets=meets)

    def at(self, index: Any) -> Self:
        """Select iterations, or ranks of one, with a numpy index along the leading axes of `duration_ns`."""
        meets = {condition: ranks[index] for condition, ranks in self.meets.items()}
        cost_ns = self.cost_ns[index] if self.cost_ns.ndim > 1 else self.cost_ns
        slow_down = self.slow_down[index] if isinstance(self.slow_down, np.ndarray) else self.slow_down
        return replace(self, duration_ns=self.duration_ns[index], cost_ns=cost_ns, slow_down=slow_down, meets=meets)
