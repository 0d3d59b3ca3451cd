"""Timeline: what an engine takes, an iteration with its durations, and returns: when everything in it happened."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..fabric import LinkShare
from ..schedule.schedule import CollectiveKind, Compute, ComputeKind, Condition, Instruction, IterationSchedule, Wait
from ..workload.compute_times import Floats, Nanoseconds

SpanKind = ComputeKind | CollectiveKind | Literal["wait", "straggler", "queued"]
Stream = Literal["compute", "comm"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInput:
    """An iteration to simulate: a schedule and its durations.

    Of ranks with identical behaviour, only one is simulated.
    """

    schedule: IterationSchedule  #: steps of every rank
    duration_ns: Nanoseconds
    """Duration of each computing step at full speed; shape [ranks, steps of the schedule]. For the closed form there
    may be more leading axes, for example one for the iterations."""
    ranks: tuple[int, ...]  #: the simulated ranks
    represented_by: NDArray[np.int64]  #: for every rank, the simulated rank that behaves the same; shape [world size]
    cost_ns: Nanoseconds
    """Duration of each collective alone; shape [collectives] or, see `stack`, [iterations, collectives]."""
    concurrency: int = 1  #: collectives that run at the same time; they start in launch order
    sharing: tuple[LinkShare, ...]  #: how each collective shares the link with others that run at the same time
    slow_down: float | Floats = 1.0
    """Factor on the time of computing while any collective runs, or one for each iteration."""
    meets: Mapping[Condition, NDArray[np.bool_]] = field(default_factory=dict)
    """By condition of a `Wait`, whether each rank meets it; shape [ranks] or, for the closed form, the leading axes
    of `duration_ns`."""

    @classmethod
    def stack(cls, iterations: Sequence[Self]) -> Self:
        """Combine single iterations, which differ in durations, costs of collectives and slow-downs, into many."""
        duration_ns = np.stack([one.duration_ns for one in iterations])
        cost_ns = np.stack([one.cost_ns for one in iterations])
        slow_down = np.array([one.slow_down for one in iterations])
        meets = {only: np.stack([one.meets[only] for one in iterations]) for only in iterations[0].meets}
        return replace(iterations[0], duration_ns=duration_ns, cost_ns=cost_ns, slow_down=slow_down, meets=meets)

    def at(self, index: Any) -> Self:
        """Select iterations, or ranks of one, with a numpy index along the leading axes of `duration_ns`."""
        meets = {condition: ranks[index] for condition, ranks in self.meets.items()}
        cost_ns = self.cost_ns[index] if self.cost_ns.ndim > 1 else self.cost_ns
        slow_down = self.slow_down[index] if isinstance(self.slow_down, np.ndarray) else self.slow_down
        return replace(self, duration_ns=self.duration_ns[index], cost_ns=cost_ns, slow_down=slow_down, meets=meets)


class Span(NamedTuple):
    """One activity of one rank from `start_ns` to `end_ns`, on the stream "compute" or "comm".

    Kinds on the stream "compute":

    - *unsynchronized*: the preceding iterations under `no_sync`
    - *rebuild*: rebuilding the buckets
    - *forward*, *backward*: the passes
    - *search*: searching the graph for unused parameters
    - *pack*, *copy_out*: copying gradients into a bucket, and averages out of the bucket
    - *unshard*: FSDP2's copies of the parameters, before the forward pass
    - *compress*, *recompress*, *decompress*: computation of a comm hook before its first collective, before its
      second one and after its last
    - *launch*: issuing a collective
    - *wait*: waiting for a collective
    - *step*: the optimiser step and everything else up to the next iteration

    Kinds on the stream "comm" before a collective runs:

    - *straggler*: launched on this rank, but not yet on all ranks
    - *queued*: launched on all ranks, but the process group has no free slot

    Kinds on the stream "comm" while a collective runs:

    - *broadcast*: broadcast of buffers, or of updated parameters after the step
    - *order*: broadcast of rank 0's ready order, at the rebuild
    - *join*: all-reduce that Join adds, such as that of the number of ranks with inputs
    - *all_reduce*, *second_all_reduce*: first and second collective of a bucket
    - *bitmap*: all-reduce of the bitmap of used parameters

    `bucket` is the bucket index; None if the span belongs to no bucket.
    """

    rank: int
    stream: Stream
    kind: SpanKind
    bucket: int | None
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """`end_ns - start_ns`."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Timeline:
    """When everything in one simulated iteration happened, in nanoseconds from the start of the iteration."""

    engine_input: EngineInput  #: the simulated iteration
    end_ns: Nanoseconds  #: when each rank ended each instruction of the schedule; shape [ranks, instructions]
    start_ns: Nanoseconds  #: when each collective started to run; shape [collectives]
    done_ns: Nanoseconds  #: when each collective finished; shape [collectives]

    @property
    def iteration_ns(self) -> int:
        """Duration of the iteration: the end of the slowest rank."""
        return int(self.end_ns[:, -1].max())

    @property
    def slowest_row(self) -> int:
        """Row of the slowest rank in `end_ns`; the first one if several are equally slow."""
        return int(self.end_ns[:, -1].argmax())

    @property
    def launched_ns(self) -> Nanoseconds:
        """When each rank launched each collective, in nanoseconds; shape [ranks, collectives]."""
        return self.end_ns[:, self.engine_input.schedule.launches]

    def spans(self) -> Iterator[Span]:
        """Yield all spans longer than 0 ns, rank by rank: first the rank's computation, then its collectives."""
        launched = self.launched_ns
        launched_by_all = launched.max(axis=0, initial=0).tolist()
        starts, ends = self.start_ns.tolist(), self.done_ns.tolist()
        collectives = self.engine_input.schedule.collectives
        for row, rank in enumerate(self.engine_input.ranks):
            for instruction, start, end in self.executed(row):
                if isinstance(instruction, Compute) and start < end:
                    yield Span(rank, "compute", instruction.kind, instruction.bucket, start, end)
                elif isinstance(instruction, Wait) and start < end:
                    yield Span(rank, "compute", "wait", collectives[instruction.collective].bucket, start, end)
            for number, collective in enumerate(collectives):
                moments = (int(launched[row, number]), launched_by_all[number], starts[number], ends[number])
                kinds: tuple[SpanKind, ...] = ("straggler", "queued", collective.kind)
                for kind, start, end in zip(kinds, moments, moments[1:], strict=False):
                    if start < end:
                        yield Span(rank, "comm", kind, collective.bucket, start, end)

    def executed(self, row: int) -> Iterator[tuple[Instruction, int, int]]:
        """Yield the instructions of the rank in this row, each with its start and end."""
        ends = self.end_ns[row].tolist()
        return zip(self.engine_input.schedule.instructions, [0, *ends[:-1]], ends, strict=True)
