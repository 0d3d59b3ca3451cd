"""Timeline: when everything in a simulated iteration happened; both engines return one."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .schedule.costs import EngineInput, Nanoseconds
from .schedule.schedule import CollectiveKind, Compute, ComputeKind, Launch, Wait

Kind = ComputeKind | CollectiveKind | Literal["wait", "straggler", "queued"]
Stream = Literal["compute", "comm"]


class Span(NamedTuple):
    """Something that kept one stream of one rank from `start_ns` to `end_ns`.

    On the stream "compute": *unsynchronized* (iterations under `no_sync` that go before), *rebuild* (buckets laid out
    anew), *forward*, *search* (for unused parameters), *backward*, *pack* (gradients into their bucket), *compress*,
    *recompress* and *decompress* (a comm hook, before its first and its second collective and after the last),
    *launch*, *wait* (for a collective), *copy_out* and *step* (optimiser and all else up to the next iteration).

    On the stream "comm": *straggler* (launched here, a peer is late) and *queued* (launched by all, the backend is
    busy), then the collective: *broadcast* of buffers, *order* (rank 0's order of readiness, at the rebuild), *join*
    (the count of ranks with inputs), *all_reduce* and *second_all_reduce* of a bucket, *bitmap* of used parameters.

    `bucket` is the bucket index, None where no bucket is meant.
    """

    rank: int
    stream: Stream
    kind: Kind
    bucket: int | None
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """How long it took."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Timeline:
    """An iteration's moments, counted from its start.

    Attributes:
        job: What was simulated.
        end_ns: When each rank was done with each instruction of the script; shape [ranks, instructions].
        start_ns: When each collective began to run; shape [collectives].
        done_ns: When each collective was done; shape [collectives].
    """

    engine_input: EngineInput
    end_ns: Nanoseconds
    start_ns: Nanoseconds
    done_ns: Nanoseconds

    @property
    def iteration_ns(self) -> int:
        """The slowest rank's end."""
        return int(self.end_ns[:, -1].max())

    @property
    def launched_ns(self) -> Nanoseconds:
        """When each rank launched each collective; shape [ranks, collectives]."""
        places = [
            place for place, step in enumerate(self.engine_input.schedule.instructions) if isinstance(step, Launch)
        ]
        return self.end_ns[:, places]

    def spans(self) -> Iterator[Span]:
        """All spans that took any time, rank by rank: first those of its computation, then its collectives."""
        launched = self.launched_ns
        complete = launched.max(axis=0, initial=0).tolist()
        starts, ends = self.start_ns.tolist(), self.done_ns.tolist()
        for row, rank in enumerate(self.engine_input.ranks):
            yield from self._computation(row, rank)
            for number, collective in enumerate(self.engine_input.schedule.collectives):
                moments = (int(launched[row, number]), complete[number], starts[number], ends[number])
                kinds: tuple[Kind, ...] = ("straggler", "queued", collective.kind)
                for place, kind in enumerate(kinds):
                    if moments[place] < moments[place + 1]:
                        yield Span(rank, "comm", kind, collective.bucket, moments[place], moments[place + 1])

    def _computation(self, row: int, rank: int) -> Iterator[Span]:
        start = 0
        for instruction, end in zip(self.engine_input.schedule.instructions, self.end_ns[row].tolist(), strict=True):
            if end > start:
                if isinstance(instruction, Compute):
                    yield Span(rank, "compute", instruction.kind, instruction.bucket, start, end)
                elif isinstance(instruction, Wait):
                    bucket = self.engine_input.schedule.collectives[instruction.collective].bucket
                    yield Span(rank, "compute", "wait", bucket, start, end)
            start = end
