"""Spans: the flat record of a simulated iteration, from which every table, figure and export derives."""

from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "launch", "wait", "copy_out", "step", "broadcast", "queued", "all_reduce"]
Stream = Literal["compute", "comm"]


class Span(NamedTuple):
    """Something that kept one stream of one rank from `start_ns` to `end_ns`.

    On the stream "compute": *forward*, *backward* (with copying gradients into buckets), *launch*, *wait* (for
    an all-reduce after the backward pass), *copy_out* and *step* (optimiser and all else up to the next
    iteration). On the stream "comm": *broadcast* of buffers, *queued* (launched here, but a peer is late or
    the backend busy) and *all_reduce*. `bucket` is the bucket index, None where no bucket is meant.
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


def iteration_ns(spans: tuple[Span, ...]) -> int:
    """From the start of the iteration, which is 0, to the end of the last span of the slowest rank."""
    return max((span.end_ns for span in spans), default=0)
