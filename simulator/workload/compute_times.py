"""Compute times: how long each rank computes in an iteration and when its gradients are ready, as arrays.

Everything here is pure arithmetic on a trace. Times count *computation*: where a rank is slowed down or has to
wait, the engines add to them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from reference.trace import Iteration, Trace

Nanoseconds = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ComputeTimes:
    """Iterations without communication, each counted from its own start, in nanoseconds.

    Arrays of any leading shape: of iterations, of ranks, or empty for a single iteration of a single rank.

    Attributes:
        forward_ns: When the forward pass ends.
        ready_ns: When each gradient is ready, by parameter index along the last axis.
        backward_end_ns: When the backward pass ends.
        step_ns: How long all that comes after it takes: the optimiser, and what precedes the next iteration.
        optimizer_ns: How much of `step_ns` is the optimiser's; iterations that do not synchronise leave it out.
        before_ns: How long each iteration under `no_sync` takes that goes before this one, along the last axis.
    """

    forward_ns: Nanoseconds
    ready_ns: Nanoseconds
    backward_end_ns: Nanoseconds
    step_ns: Nanoseconds
    optimizer_ns: Nanoseconds
    before_ns: Nanoseconds

    @property
    def compute_ns(self) -> Nanoseconds:
        """The whole iteration, if no communication existed."""
        return self.backward_end_ns + self.step_ns

    def __getitem__(self, index: Any) -> Self:
        """Some of the ranks or iterations, by any index of numpy's along the leading axes."""
        return type(self)(*(getattr(self, field.name)[index] for field in fields(self)))


def stack(works: Sequence[ComputeTimes]) -> ComputeTimes:
    """Works of equal shapes along a new first axis."""
    return ComputeTimes(*(np.stack([getattr(work, field.name) for work in works]) for field in fields(ComputeTimes)))


def concatenate(works: Sequence[ComputeTimes]) -> ComputeTimes:
    """Works one after the other along their first axis."""
    return ComputeTimes(
        *(np.concatenate([getattr(work, field.name) for work in works]) for field in fields(ComputeTimes))
    )


def scaled(work: ComputeTimes, factors: NDArray[np.float64]) -> ComputeTimes:
    """Each rank's computation times its factor; `factors` has the axes of `work`."""

    def scale(ns: Nanoseconds) -> Nanoseconds:
        return np.rint(ns * factors.reshape(factors.shape + (1,) * (ns.ndim - factors.ndim))).astype(np.int64)

    return ComputeTimes(*(scale(getattr(work, field.name)) for field in fields(ComputeTimes)))


def recorded_compute_times(trace: Trace, *, unused_allowed: bool = False) -> list[ComputeTimes]:
    """All recorded iterations by rank: one `ComputeTimes` a rank, its first axis the iterations.

    In a trace recorded with communication the backward pass counts up to its last gradient: what follows
    there is waiting for all-reduces.

    Args:
        trace: Any recording.
        unused_allowed: Whether a parameter may have got no gradient; it counts as ready with the first that
            does, as the reducer marks it under `find_unused_parameters`.

    Raises:
        ValueError: A parameter got no gradient and that is not allowed; its bucket would never be launched.
    """
    is_plain = trace.workload.source == "module"
    works = []
    for rank in trace.ranks:
        if not unused_allowed:
            for number, iteration in enumerate(rank.iterations):
                _check_all_ready(trace, iteration, f"rank {rank.rank}, iteration {number}")
        works.append(stack([_iteration_work(iteration, is_plain=is_plain) for iteration in rank.iterations]))
    return works


def ready_order(trace: Trace) -> tuple[list[int], list[int]]:
    """Parameter indices as rank 0's gradients became ready in its last iteration, and those that got none.

    The rebuild walks the first; a static graph puts the others into a last bucket.
    """
    ready = trace.ranks[0].iterations[-1].ready_ns
    moments = {index: moment for index, moment in enumerate(ready) if moment is not None}
    return sorted(moments, key=moments.__getitem__), [index for index in range(len(ready)) if index not in moments]


def unused_parameters(trace: Trace) -> tuple[frozenset[int], frozenset[int]]:
    """Indices of parameters that got no gradient in any recorded iteration, and of those that got none in some."""
    missing = [
        frozenset(index for index, moment in enumerate(iteration.ready_ns) if moment is None)
        for rank in trace.ranks
        for iteration in rank.iterations
    ]
    return frozenset.intersection(*missing), frozenset.union(*missing)


def _iteration_work(recorded: Iteration, *, is_plain: bool) -> ComputeTimes:
    start = recorded.forward_start_ns
    first = min((moment for moment in recorded.ready_ns if moment is not None), default=recorded.backward_start_ns)
    ready = np.array([first if moment is None else moment for moment in recorded.ready_ns], dtype=np.int64)
    backward_end = recorded.backward_end_ns if is_plain else int(ready.max())
    optimizer = (recorded.optimizer_end_ns or 0) - (recorded.optimizer_start_ns or 0)
    return ComputeTimes(
        forward_ns=np.int64(recorded.forward_end_ns - start),  # type: ignore[arg-type]  # an array without axes
        ready_ns=ready - start,
        backward_end_ns=np.int64(backward_end - start),  # type: ignore[arg-type]
        step_ns=np.int64(recorded.end_ns - recorded.backward_end_ns),  # type: ignore[arg-type]
        optimizer_ns=np.int64(optimizer),  # type: ignore[arg-type]
        before_ns=np.zeros(0, np.int64),
    )


def _check_all_ready(trace: Trace, iteration: Iteration, where: str) -> None:
    names = [
        parameter.name
        for parameter, moment in zip(trace.workload.parameters, iteration.ready_ns, strict=True)
        if moment is None
    ]
    if names:
        raise ValueError(
            f"trace: {where}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''} got no gradient, so the "
            "bucket would never be launched; pass find_unused_parameters=True, as the training must, or record an "
            "iteration in which every parameter takes part"
        )
