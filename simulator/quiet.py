"""Quiet: leave the machine's noise out of a recording.

On a shared machine a neighbour can halve a core's speed for seconds, and no clock or counter of ours tells. But
computation without communication takes the same time whenever the machine is quiet: where it takes much longer
than at its best, the machine was noisy, and a prediction is better off without that iteration.
"""

from collections.abc import Sequence

from reference.trace import Trace

TOLERANCE = 1.15
"""How much longer than at its best computation may take for the machine to count as quiet."""


def quiet_limit_ns(compute_ns: Sequence[int]) -> int:
    """The longest time of computation that counts as quiet: TOLERANCE over the 10 % quantile of `compute_ns`."""
    ordered = sorted(compute_ns)
    return round(TOLERANCE * ordered[len(ordered) // 10])


def iteration_times_ns(trace: Trace) -> list[int]:
    """Time of every iteration that all ranks recorded: of each, the slowest rank's."""
    return [
        max(i.duration_ns for i in same) for same in zip(*(rank.iterations for rank in trace.ranks), strict=False)
    ]


def quiet_part(trace: Trace) -> Trace:
    """The trace without the iterations in which the machine was noisy on any rank."""
    times = iteration_times_ns(trace)
    limit = quiet_limit_ns(times)
    quiet = [number for number, ns in enumerate(times) if ns <= limit]
    ranks = (
        rank.model_copy(update={"iterations": tuple(rank.iterations[number] for number in quiet)})
        for rank in trace.ranks
    )
    return trace.model_copy(update={"ranks": tuple(ranks)})
