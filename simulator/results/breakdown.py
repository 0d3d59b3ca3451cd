"""Breakdown of the slowest rank's iteration into parts, and the critical path, which determines its duration."""

from collections.abc import Iterator

from ..engines.timeline import Span, Timeline
from ..schedule.schedule import Compute, ComputeKind, Wait

PARTS: dict[str, tuple[ComputeKind, ...]] = {
    "unsynchronized": ("unsynchronized",),
    "forward": ("forward",),
    "backward": ("backward",),
    "search": ("search",),
    "copies": ("unshard", "pack", "copy_out"),
    "hook": ("compress", "recompress", "decompress"),
    "launch": ("launch",),
    "rebuild": ("rebuild",),
    "optimizer": ("step",),
}
"""The kinds of computing steps in each part; a part is the sum of their durations at full speed."""


def break_down(timeline: Timeline) -> dict[str, int]:
    """Divide the slowest rank's iteration into parts that add up to it, in nanoseconds.

    The parts in `PARTS` are computation at full speed. `slowdown` is the time that collectives add to them,
    `exposed_comm` is waiting while a collective runs, and `stragglers` is waiting while none runs, because a rank has
    not launched it yet.
    """
    row = timeline.slowest_row
    full_speed_ns = iter(timeline.engine_input.duration_ns[row].tolist())
    part_of = {kind: part for part, kinds in PARTS.items() for kind in kinds}
    parts = dict.fromkeys([*PARTS, "slowdown", "exposed_comm", "stragglers"], 0)
    for instruction, start, end in timeline.executed(row):
        if isinstance(instruction, Compute):
            duration_ns = next(full_speed_ns)
            parts[part_of[instruction.kind]] += duration_ns
            parts["slowdown"] += end - start - duration_ns
        elif isinstance(instruction, Wait):
            parts["stragglers"] += end - start
    parts["exposed_comm"] = sum(end - start for start, end in exposed_intervals(timeline))
    parts["stragglers"] -= parts["exposed_comm"]
    return parts


def exposed_intervals(timeline: Timeline) -> list[list[int]]:
    """Return the times for which the slowest rank waits while a collective runs, as disjoint `[start, end]`."""
    starts, ends = timeline.start_ns, timeline.done_ns
    intervals: list[list[int]] = []
    for instruction, begin, end in timeline.executed(timeline.slowest_row):
        if isinstance(instruction, Wait) and end > begin:
            inside = (starts < end) & (ends > begin) & (starts < ends)
            for start, done in sorted(zip(starts[inside].tolist(), ends[inside].tolist(), strict=True)):
                low, high = max(start, begin), min(done, end)
                if intervals and low <= intervals[-1][1]:
                    intervals[-1][1] = max(high, intervals[-1][1])
                else:
                    intervals.append([low, high])
    return intervals


def critical_path(timeline: Timeline) -> tuple[Span, ...]:
    """Find the chain of spans that leads from the start to the end of the iteration without a gap.

    The chain is followed backwards from the end of the slowest rank. A wait leads to its collective; a collective
    leads to the last rank that launched it or, if it was queued, to the collective whose slot it took over.
    """
    return tuple(_backwards(timeline))[::-1]


def _backwards(timeline: Timeline) -> Iterator[Span]:
    engine_input, launched = timeline.engine_input, timeline.launched_ns
    schedule, launches = engine_input.schedule, engine_input.schedule.launches
    row, place = timeline.slowest_row, len(schedule.instructions) - 1
    while place >= 0:
        instruction = schedule.instructions[place]
        end = int(timeline.end_ns[row, place])
        start = int(timeline.end_ns[row, place - 1]) if place else 0
        if isinstance(instruction, Wait) and end > start:
            number = instruction.collective
            yield from _ran(timeline, number, row)
            while launched[:, number].max() < timeline.start_ns[number]:
                start_ns = timeline.start_ns[number]  # when the end of another collective freed a slot
                number = next(other for other in range(number) if timeline.done_ns[other] == start_ns)
                yield from _ran(timeline, number, row)
            row, place = int(launched[:, number].argmax()), launches[number]
        elif isinstance(instruction, Compute) and end > start:
            yield Span(engine_input.ranks[row], "compute", instruction.kind, instruction.bucket, start, end)
        place -= 1


def _ran(timeline: Timeline, number: int, row: int) -> Iterator[Span]:
    """Yield the span of a collective on one rank, if it took any time."""
    start, done = int(timeline.start_ns[number]), int(timeline.done_ns[number])
    if start < done:
        collective = timeline.engine_input.schedule.collectives[number]
        yield Span(timeline.engine_input.ranks[row], "comm", collective.kind, collective.bucket, start, done)
