"""Export to the Chrome trace event format, which ui.perfetto.dev and chrome://tracing open.

One process a rank; a track for its computation and one for each collective that is under way at a time; an
arrow from each launch to its all-reduce. Format: "Trace Event Format" of the Chromium project; its times are
microseconds, here with fractions.
"""

from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from typing import Any

from ..spans import Span

COMPUTE_TRACK = 1
FIRST_COMM_TRACK = 2

Event = dict[str, Any]


def chrome_trace(spans: Iterable[Span]) -> Event:
    """The whole document, ready for `json.dump`."""
    events: list[Event] = []
    for rank, of_rank in groupby(sorted(spans, key=attrgetter("rank", "start_ns", "end_ns")), attrgetter("rank")):
        events.extend(_rank_events(rank, list(of_rank)))
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _rank_events(rank: int, spans: list[Span]) -> list[Event]:
    tracks = _tracks(spans)
    names = {COMPUTE_TRACK: "computation"} | {
        track: f"communication {track - COMPUTE_TRACK}" for track in sorted(set(tracks) - {COMPUTE_TRACK})
    }
    events: list[Event] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}},
        *({"ph": "M", "pid": rank, "tid": track, "name": "thread_name", "args": {"name": name}}
          for track, name in names.items()),
    ]  # fmt: skip
    for span, track in zip(spans, tracks, strict=True):
        events.append(_slice(span, track))
        if span.kind == "launch":
            events.append(_arrow("s", span, track, span.start_ns))
        elif span.kind == "all_reduce":
            events.append(_arrow("f", span, track, span.start_ns))
    return events


def _tracks(spans: list[Span]) -> list[int]:
    """A track for each span: slices of one track must not overlap, and a bucket keeps to one."""
    free_at: list[int] = []  # by communication track
    of_bucket: dict[int | None, int] = {}
    tracks = []
    for span in spans:
        if span.stream == "compute":
            tracks.append(COMPUTE_TRACK)
            continue
        if span.bucket not in of_bucket:
            free = [lane for lane, end in enumerate(free_at) if end <= span.start_ns]
            if not free:
                free = [len(free_at)]
                free_at.append(0)
            of_bucket[span.bucket] = free[0]
            ends = (other.end_ns for other in spans if other.stream == "comm" and other.bucket == span.bucket)
            free_at[free[0]] = max(ends)
        tracks.append(FIRST_COMM_TRACK + of_bucket[span.bucket])
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


def _arrow(end: str, span: Span, track: int, at_ns: int) -> Event:
    """Start ("s") or finish ("f") of an arrow; both ends carry one id, and bind to the slice around them."""
    arrow = {"ph": end, "pid": span.rank, "tid": track, "name": "launch", "cat": "launch", "ts": at_ns / 1000}
    return arrow | {"id": f"{span.rank}.{span.bucket}"} | ({"bp": "e"} if end == "f" else {})
