"""Lanes of tutorial 7: what each rank did when, recorded while it trains, and a picture of all lanes."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal
from unittest import mock

import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.patches import Polygon, Rectangle
from torch import Tensor

from reference.join import UnevenInputsHook
from simulator import plot_colours

Kind = Literal["batch", "shadow", "all-reduce"]
COLOURS = {
    "batch": plot_colours.FORWARD,
    "shadow": "white",
    "waits": plot_colours.STRAGGLER,
    "gradients": plot_colours.EXPOSED,
    "count": plot_colours.QUIET,
}
LANE_HEIGHT, LANE_PITCH = 0.6, 1.5
SETTLE_S = 1.0
"""How long to wait for the callback of an all-reduce when recording ends."""


@dataclass
class Event:
    """One iteration or all-reduce of a rank.

    Attributes:
        kind: "batch": an iteration with inputs; "shadow": the iteration of a rank without inputs; "all-reduce".
        start_ns: When it began, by a clock that all processes share.
        end_ns: When it ended. None: it never did.
        size_bytes: Bytes of an all-reduce.
    """

    kind: Kind
    start_ns: int
    end_ns: int | None = None
    size_bytes: int = 0


@dataclass
class Lane:
    """What one rank did, in the order of the starts."""

    events: list[Event] = field(default_factory=list)

    @contextmanager
    def iteration(self, kind: Kind = "batch") -> Iterator[None]:
        """Record an iteration; if it raises, it has no end."""
        event = Event(kind, time.perf_counter_ns())
        self.events.append(event)
        yield
        event.end_ns = time.perf_counter_ns()

    def of(self, kind: Kind) -> list[Event]:
        """The events of one kind."""
        return [event for event in self.events if event.kind == kind]


@contextmanager
def recorded() -> Iterator[Lane]:
    """Record all all-reduces and shadow iterations of this rank within the block; the caller records iterations."""
    lane = Lane()
    settled: list[threading.Event] = []
    all_reduce: Any = dist.ProcessGroup.allreduce
    shadow: Callable[[UnevenInputsHook], None] = UnevenInputsHook.main_hook

    def timed(group: dist.ProcessGroup, tensors: Sequence[Tensor], *arguments: Any) -> Any:
        event = Event("all-reduce", time.perf_counter_ns(), size_bytes=sum(tensor.nbytes for tensor in tensors))
        lane.events.append(event)
        work = all_reduce(group, tensors, *arguments)
        settled.append(done := threading.Event())
        work.get_future().then(lambda future: _ended(event, future, done))
        return work

    def shadowed(hook: UnevenInputsHook) -> None:
        with lane.iteration("shadow"):
            shadow(hook)

    with (
        mock.patch.object(dist.ProcessGroup, "allreduce", timed),
        mock.patch.object(UnevenInputsHook, "main_hook", shadowed),
    ):
        try:
            yield lane
        finally:  # a rank may have the result before Gloo's thread has run the callback
            for done in settled:
                done.wait(SETTLE_S)


def _ended(event: Event, future: Any, done: threading.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the all-reduce failed, and has no end
        future.value()
        event.end_ns = time.perf_counter_ns()
    done.set()


def linked(lanes: Sequence[Lane]) -> list[tuple[Event, ...]]:
    """All-reduces that every rank issued, each with one event per rank, in launch order.

    Ranks of one process group issue the same all-reduces in the same order, so the n-th of each rank belong together.
    """
    return list(zip(*(lane.of("all-reduce") for lane in lanes), strict=False))


def draw_lanes(lanes: Sequence[Lane], ax: Axes, *, labels: Sequence[str] = (), until_ms: float | None = None) -> Axes:
    """One lane a rank: boxes of iterations, hatched for shadows, brown for endless waits; bands of all-reduces.

    A band spans, on each lane, the time from the rank's launch of the all-reduce to its result. The largest
    all-reduces count as those of gradients. A shadow includes the all-reduce in which the rank waited for the others.

    Args:
        lanes: By rank.
        ax: Axes to draw on.
        labels: Text for each all-reduce of gradients, in launch order. Empty: none.
        until_ms: Right edge of the picture. None: the last event.

    Returns:
        The axes.
    """
    every = [event for lane in lanes for event in lane.events]
    origin = min(event.start_ns for event in every)
    right = until_ms or (max(event.end_ns or event.start_ns for event in every) - origin) / 1e6 + 2

    def ms(ns: int | None) -> float:
        return right if ns is None else (ns - origin) / 1e6

    for rank, lane in enumerate(lanes):
        _draw_lane(lane, -LANE_PITCH * rank, ax, ms)
    largest = max(event.size_bytes for event in every)
    texts = iter(labels)
    for events in linked(lanes):
        of_gradients = events[0].size_bytes == largest
        colour = COLOURS["gradients" if of_gradients else "count"]
        _link(events, ax, ms, colour, next(texts, "") if of_gradients else "")
    ax.set_xlim(-1, right)
    ax.set_ylim(-LANE_PITCH * (len(lanes) - 1) - 0.1, LANE_HEIGHT + 0.1)
    places = [LANE_HEIGHT / 2 - LANE_PITCH * rank for rank in range(len(lanes))]
    ax.set_yticks(places, [f"rank {rank}" for rank in range(len(lanes))])
    ax.set_xlabel("ms")
    _add_legend(ax, every)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    return ax


def _draw_lane(lane: Lane, bottom: float, ax: Axes, ms: Callable[[int | None], float]) -> None:
    number = 0
    for event in lane.events:
        if event.kind == "all-reduce":
            continue
        number += 1
        is_shadow = event.kind == "shadow"
        start, end = ms(event.start_ns), ms(event.end_ns)
        if is_shadow:
            start = ms(_before(lane, event).start_ns)
        elif event.end_ns is None:
            end = ms(max(one.start_ns for one in lane.of("all-reduce")))
            _box(ax, end, ms(None), bottom, "waits", facecolor=COLOURS["waits"])
        _box(ax, start, end, bottom, str(number), facecolor=COLOURS[event.kind], hatch="///" if is_shadow else None)


def _add_legend(ax: Axes, events: Sequence[Event]) -> None:
    kinds = {event.kind for event in events}
    handles = [Rectangle((0, 0), 1, 1, facecolor=COLOURS["batch"], edgecolor=plot_colours.INK, label="with a batch")]
    if "shadow" in kinds:
        style: dict[str, Any] = {"facecolor": COLOURS["shadow"], "edgecolor": plot_colours.INK, "hatch": "///"}
        handles.append(Rectangle((0, 0), 1, 1, label="shadow", **style))
    handles.append(Rectangle((0, 0), 1, 1, color=COLOURS["gradients"], alpha=0.6, label="all-reduce of gradients"))
    if len({event.size_bytes for event in events if event.kind == "all-reduce"}) > 1:
        handles.append(Rectangle((0, 0), 1, 1, color=COLOURS["count"], alpha=0.6, label="other all-reduce"))
    place = (0.0, 0.97)
    ax.legend(handles=handles, loc="lower left", bbox_to_anchor=place, ncols=len(handles), fontsize=9, frameon=False)


def _before(lane: Lane, event: Event) -> Event:
    """The last all-reduce that the rank launched before an event, or the event itself if there was none."""
    earlier = [one for one in lane.of("all-reduce") if one.start_ns < event.start_ns]
    return earlier[-1] if earlier else event


def _box(ax: Axes, start: float, end: float, bottom: float, text: str, **style: Any) -> None:
    ax.add_patch(Rectangle((start, bottom), end - start, LANE_HEIGHT, edgecolor=plot_colours.INK, zorder=2, **style))
    outline = {"facecolor": style["facecolor"], "edgecolor": "none", "pad": 1.5}
    place = ((start + end) / 2, bottom + LANE_HEIGHT / 2)
    ax.text(*place, text, ha="center", va="center", bbox=outline, zorder=4)


def _link(events: Sequence[Event], ax: Axes, ms: Callable[[int | None], float], colour: str, label: str) -> None:
    """Draw the bands of one all-reduce between neighbouring lanes."""
    for rank, (upper, lower) in enumerate(pairwise(events)):
        top, bottom = -LANE_PITCH * rank, -LANE_PITCH * (rank + 1) + LANE_HEIGHT
        corners = [
            (ms(upper.start_ns), top),
            (ms(upper.end_ns), top),
            (ms(lower.end_ns), bottom),
            (ms(lower.start_ns), bottom),
        ]
        ax.add_patch(Polygon(corners, facecolor=colour, edgecolor=colour, alpha=0.6, linewidth=1.2))
        place = (max(x for x, _ in corners) - 1, (top + bottom) / 2)
        ax.text(*place, label, ha="right", va="center", fontsize=9, zorder=5)
