"""Export to the Chrome trace event format, which ui.perfetto.dev and chrome://tracing open.

One process a rank; of very many ranks, one for all that do the same. In it a track for its computation, one for
copies into and out of buckets, one for each collective that is under way at a time. Arrows lead from a bucket's last
gradient to its launch and on to the end of its collective, and a counter shows the bytes in flight. Format: "Trace
Event Format" of the Chromium project; its times are microseconds, here with fractions.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import Any

from ..timeline import Span, Timeline

COMPUTE_TRACK = 1
COPY_TRACK = 2
FIRST_COMM_TRACK = 3
COPIES = ("pack", "copy_out")
MOST_PROCESSES = 64
"""Where there are more ranks, those that do the same share a process."""
NUMBERS_IN_NAME = 3
"""Of ranks that share a process."""

Event = dict[str, Any]


def chrome_trace(timeline: Timeline) -> Event:
    """The whole document, ready for `json.dump`."""
    events: list[Event] = []
    by_rank = sorted(timeline.spans(), key=attrgetter("rank", "start_ns", "end_ns"))
    simulated = {rank: list(spans) for rank, spans in groupby(by_rank, attrgetter("rank"))}
    for rank, represented_by, name in _processes(timeline.engine_input.alike()):
        spans = [span._replace(rank=rank) for span in simulated.get(represented_by, [])]
        tracks = _tracks(spans)
        events.extend(_names(rank, name, tracks))
        events.extend(_slice(span, track) for span, track in zip(spans, tracks, strict=True))
        events.extend(_arrows(spans, tracks))
        events.extend(_bytes_in_flight(rank, timeline))
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _processes(alike: dict[int, list[int]]) -> Iterator[tuple[int, int, str]]:
    """Each process: its number, the simulated rank that it shows, and its name."""
    if sum(map(len, alike.values())) <= MOST_PROCESSES:
        for rank, represented_by in sorted(
            (rank, represented_by) for represented_by, ranks in alike.items() for rank in ranks
        ):
            yield rank, represented_by, f"rank {rank}"
        return
    for rank, ranks in alike.items():
        numbers = [*map(str, ranks[:NUMBERS_IN_NAME]), *["..."] * (len(ranks) > NUMBERS_IN_NAME)]
        others = f" ({len(ranks)} alike: {', '.join(numbers)})" if len(ranks) > 1 else ""
        yield rank, rank, f"rank {rank}{others}"


def _names(rank: int, name: str, tracks: Iterable[int]) -> list[Event]:
    names = {COMPUTE_TRACK: "computation", COPY_TRACK: "copies"}
    names |= {track: f"communication {track - COPY_TRACK}" for track in sorted(set(tracks) - set(names))}
    return [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}},
        *(
            {"ph": "M", "pid": rank, "tid": track, "name": "thread_name", "args": {"name": name}}
            for track, name in names.items()
        ),
    ]


def _tracks(spans: list[Span]) -> list[int]:
    """A track for each span: slices of one track must not overlap; a span goes on where another just ended."""
    free_at: list[int] = []  # by communication track
    tracks = []
    lane = 0
    for span in spans:
        if span.stream == "compute":
            tracks.append(COPY_TRACK if span.kind in COPIES else COMPUTE_TRACK)
            continue
        begins = [at for at, end in enumerate(free_at) if end == span.start_ns]  # goes on, or follows on
        free = begins or [at for at, end in enumerate(free_at) if end <= span.start_ns]
        lane = free[0] if free else len(free_at)
        free_at[lane:] = [span.end_ns, *free_at[lane + 1 :]]
        tracks.append(FIRST_COMM_TRACK + lane)
    return tracks


def _slice(span: Span, track: int) -> Event:
    bucket = {} if span.bucket is None else {"bucket": span.bucket}
    return {
        "ph": "X",
        "pid": span.rank,
        "tid": track,
        "name": " ".join([span.kind, *map(str, bucket.values())]),
        "cat": span.stream,
        "ts": span.start_ns / 1000,
        "dur": span.duration_ns / 1000,
        "args": bucket,
    }


def _arrows(spans: list[Span], tracks: list[int]) -> list[Event]:
    """For every bucket: from where its last gradient was ready, by way of its launch, to where it was done."""
    arrows = []
    for bucket in sorted({span.bucket for span in spans if span.bucket is not None}):
        mine = [(span, track) for span, track in zip(spans, tracks, strict=True) if span.bucket == bucket]
        collectives = [pair for pair in mine if pair[0].kind in ("all_reduce", "second_all_reduce")]
        ready = [pair for pair in mine if pair[0].kind == "backward"]
        launch = [pair for pair in mine if pair[0].kind == "launch"]
        if not collectives or not (ready or launch):
            continue
        stops = [*ready[:1], *launch[:1], collectives[-1]]
        for place, (span, track) in enumerate(stops):
            phase = "s" if place == 0 else "f" if place == len(stops) - 1 else "t"
            at_ns = span.start_ns if span.kind == "launch" else span.end_ns - 1  # within: the next slice begins there
            arrows.append(_arrow(phase, span, track, at_ns))
    return arrows


def _arrow(phase: str, span: Span, track: int, at_ns: int) -> Event:
    """Start ("s"), step ("t") or finish ("f") of an arrow; all carry one id, and bind to the slice around them."""
    arrow = {"ph": phase, "pid": span.rank, "tid": track, "name": "bucket", "cat": "bucket", "ts": at_ns / 1000}
    return arrow | {"id": f"{span.rank}.{span.bucket}"} | ({"bp": "e"} if phase == "f" else {})


def _bytes_in_flight(rank: int, timeline: Timeline) -> list[Event]:
    """What the network carries for this rank, whenever that changes."""
    sizes = [collective.size_bytes for collective in timeline.engine_input.schedule.collectives]
    begun = zip(timeline.start_ns.tolist(), sizes, strict=True)
    ended = zip(timeline.done_ns.tolist(), [-size for size in sizes], strict=True)
    events = []
    carried = 0
    for at_ns, changes in groupby(sorted([*begun, *ended]), lambda change: change[0]):
        carried += sum(size for _, size in changes)
        events.append(
            {"ph": "C", "pid": rank, "name": "bytes in flight", "ts": at_ns / 1000, "args": {"bytes": carried}}
        )
    return events
