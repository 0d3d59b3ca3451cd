"""Export of a timeline to the Chrome trace event format, which ui.perfetto.dev and chrome://tracing open.

Each rank is a process; with many ranks, ranks that behave the same share a process. A process has a track for
computation, a track for copies into and out of buckets, and as many tracks for collectives as overlap. Arrows
lead from a bucket's last gradient to its launch and to the end of its collective. A counter shows bytes in flight.
Format: "Trace Event Format" of the Chromium project; times in the file are microseconds with fractions.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from ..engines.timeline import EngineInput, Span, Timeline
from .breakdown import PARTS

COMPUTE_TRACK = 1
COPY_TRACK = 2
MOST_PROCESSES = 64
"""With more ranks than this, ranks that behave the same share a process."""
RANKS_IN_NAME = 3
"""Number of ranks listed in the name of a shared process."""

Event = dict[str, Any]


def chrome_trace(timeline: Timeline) -> Event:
    """Convert a timeline to a Chrome trace document for `json.dump`."""
    events: list[Event] = []
    by_rank = sorted(timeline.spans(), key=attrgetter("rank", "start_ns", "end_ns"))
    simulated = {rank: list(spans) for rank, spans in groupby(by_rank, attrgetter("rank"))}
    for rank, represented_by, name in _processes(timeline.engine_input):
        spans = [span._replace(rank=rank) for span in simulated.get(represented_by, [])]
        tracks = _tracks(spans)
        events.extend(_names(rank, name, tracks))
        events.extend(_slice(span, track) for span, track in zip(spans, tracks, strict=True))
        events.extend(_arrows(spans, tracks))
        events.extend(_bytes_in_flight(rank, timeline))
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _processes(engine_input: EngineInput) -> Iterator[tuple[int, int, str]]:
    """Yield the number of each process, the simulated rank that it shows, and its name."""
    represented_by = engine_input.represented_by
    if len(represented_by) <= MOST_PROCESSES:
        for rank, simulated in enumerate(represented_by.tolist()):
            yield rank, simulated, f"rank {rank}"
        return
    for rank in engine_input.ranks:
        alike = np.flatnonzero(represented_by == rank)
        numbers = [*map(str, alike[:RANKS_IN_NAME]), *["..."] * (len(alike) > RANKS_IN_NAME)]
        others = f" ({len(alike)} alike: {', '.join(numbers)})" if len(alike) > 1 else ""
        yield rank, rank, f"rank {rank}{others}"


def _names(rank: int, name: str, tracks: Iterable[int]) -> list[Event]:
    names = {COMPUTE_TRACK: "computation", COPY_TRACK: "copies"}
    names |= {track: f"communication {track - COPY_TRACK}" for track in sorted(set(tracks) - set(names))}
    thread: Event = {"ph": "M", "pid": rank, "name": "thread_name"}
    threads = [thread | {"tid": track, "args": {"name": name}} for track, name in names.items()]
    return [{"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}}, *threads]


def _tracks(spans: list[Span]) -> list[int]:
    """Choose the track of each span, so that spans on one track do not overlap."""
    free_at: list[int] = []  # by communication track
    tracks = []
    for span in spans:
        if span.stream == "compute":
            tracks.append(COPY_TRACK if span.kind in PARTS["copies"] else COMPUTE_TRACK)
            continue
        just_ended = [at for at, end in enumerate(free_at) if end == span.start_ns]  # often the same collective
        free = just_ended or [at for at, end in enumerate(free_at) if end <= span.start_ns]
        lane = free[0] if free else len(free_at)
        free_at[lane:] = [span.end_ns, *free_at[lane + 1 :]]
        tracks.append(COPY_TRACK + 1 + lane)
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
    """Return, for each bucket, an arrow from its last gradient through its launch to the end of its collective.

    An arrow is a start ("s"), perhaps a step ("t"), and a finish ("f") with the same id.
    """
    arrows: list[Event] = []
    for bucket in sorted({span.bucket for span in spans if span.bucket is not None}):
        mine = [(span, track) for span, track in zip(spans, tracks, strict=True) if span.bucket == bucket]
        stops = [
            *[pair for pair in mine if pair[0].kind == "backward"][:1],
            *[pair for pair in mine if pair[0].kind == "launch"][:1],
            *[pair for pair in mine if pair[0].kind in ("all_reduce", "second_all_reduce")][-1:],
        ]
        if len(stops) < 2 or stops[-1][0].stream != "comm":
            continue
        for phase, (span, track) in zip(("s", *"t" * (len(stops) - 2), "f"), stops, strict=True):
            # An arrow binds to the slice around its time, and at `end_ns` that would be the next slice.
            at_ns = span.start_ns if span.kind == "launch" else span.end_ns - 1
            arrow = {"ph": phase, "pid": span.rank, "tid": track, "name": "bucket", "cat": "bucket"}
            arrow |= {"ts": at_ns / 1000, "id": f"{span.rank}.{bucket}"}
            arrows.append(arrow | ({"bp": "e"} if phase == "f" else {}))
    return arrows


def _bytes_in_flight(rank: int, timeline: Timeline) -> list[Event]:
    """Return a counter event with the bytes of the running collectives at each change."""
    sizes = [collective.size_bytes for collective in timeline.engine_input.schedule.collectives]
    starts = zip(timeline.start_ns.tolist(), sizes, strict=True)
    ends = zip(timeline.done_ns.tolist(), [-size for size in sizes], strict=True)
    counter: Event = {"ph": "C", "pid": rank, "name": "bytes in flight"}
    events = []
    in_flight = 0
    for at_ns, changes in groupby(sorted([*starts, *ends]), lambda change: change[0]):
        in_flight += sum(size for _, size in changes)
        events.append(counter | {"ts": at_ns / 1000, "args": {"bytes": in_flight}})
    return events
