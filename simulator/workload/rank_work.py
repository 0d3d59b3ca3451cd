"""Workload: what each rank computes in one iteration, and when its buckets can be launched.

Everything here is pure arithmetic on a trace. Times count *computation*: where a rank is slowed down or has
to wait, the replay adds to them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from reference.trace import Iteration, Trace

from ..fabric import Processor


@dataclass(frozen=True, slots=True)
class RankWork:
    """One iteration of one rank without communication; times count from the iteration's start.

    `ready_ns` is by parameter index; `step_ns` is all that comes after the backward pass.
    """

    forward_ns: int
    ready_ns: tuple[int, ...]
    backward_end_ns: int
    step_ns: int

    @property
    def compute_ns(self) -> int:
        """The whole iteration, if no communication existed."""
        return self.backward_end_ns + self.step_ns


@dataclass(frozen=True, slots=True)
class LaunchSchedule:
    """What a rank's backward pass does for its buckets, as moments of computation.

    Attributes:
        at_ns: When each bucket's launch begins, by bucket index; never decreasing.
        launch_ns: How long one launch takes.
        backward_end_ns: When the backward pass has nothing left but to wait.
    """

    at_ns: tuple[int, ...]
    launch_ns: int
    backward_end_ns: int


def rank_work(trace: Trace, rank: int, iteration: int) -> RankWork:
    """Computation of one recorded iteration.

    In a trace recorded with communication the backward pass counts up to its last gradient: what follows
    there is waiting for all-reduces.

    Raises:
        ValueError: A parameter got no gradient; its bucket would never be launched.
    """
    recorded = trace.ranks[rank].iterations[iteration]
    ready = _all_ready(trace, recorded, f"rank {rank}, iteration {iteration}")
    start = recorded.forward_start_ns
    backward_end = recorded.backward_end_ns if trace.workload.source == "module" else max(ready)
    return RankWork(
        forward_ns=recorded.forward_end_ns - start,
        ready_ns=tuple(moment - start for moment in ready),
        backward_end_ns=backward_end - start,
        step_ns=recorded.end_ns - recorded.backward_end_ns,
    )


def ready_order(trace: Trace) -> list[int]:
    """Parameter indices as rank 0's gradients became ready in its last iteration; the rebuild walks them so."""
    ready = _all_ready(trace, trace.ranks[0].iterations[-1], "rank 0, last iteration")
    return sorted(range(len(ready)), key=ready.__getitem__)


def launch_schedule(
    work: RankWork, buckets: Sequence[Sequence[int]], sizes_bytes: Sequence[int], processor: Processor
) -> LaunchSchedule:
    """Walk the gradients as they become ready, as the reducer does: pack full buckets, launch strictly in order.

    Every pack and launch takes the processor and so delays all that follows.
    """
    bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket}
    pending = [len(bucket) for bucket in buckets]
    at_ns: list[int] = []
    delay = 0
    for index in sorted(bucket_of, key=work.ready_ns.__getitem__):
        number = bucket_of[index]
        pending[number] -= 1
        if not pending[number]:
            delay += sum(processor.pack(sizes_bytes[packed]) for packed in buckets[number])
        while len(at_ns) < len(buckets) and not pending[len(at_ns)]:
            at_ns.append(work.ready_ns[index] + delay)
            delay += processor.launch_ns
    return LaunchSchedule(tuple(at_ns), processor.launch_ns, work.backward_end_ns + delay)


def _all_ready(trace: Trace, iteration: Iteration, where: str) -> list[int]:
    ready = [moment for moment in iteration.ready_ns if moment is not None]
    if len(ready) < len(iteration.ready_ns):
        names = [
            parameter.name
            for parameter, moment in zip(trace.workload.parameters, iteration.ready_ns, strict=True)
            if moment is None
        ]
        raise ValueError(
            f"trace: {where}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''} got no gradient, so the "
            "bucket would never be launched; record an iteration in which every parameter takes part"
        )
    return ready
