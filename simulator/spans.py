"""Spans: the flat record of a simulated iteration, from which every table, figure and export derives."""

from typing import Literal, NamedTuple

ComputeKind = Literal[
    "unsynchronized", "rebuild", "forward", "search", "backward", "pack", "compress", "launch", "recompress",
    "decompress", "copy_out", "step",
]  # fmt: skip
CollectiveKind = Literal["join", "order", "broadcast", "all_reduce", "second_all_reduce", "bitmap"]
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
