"""Plot of a timeline: the computation and the collectives of each rank, with the critical path framed."""

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ...reference.files.writing import milliseconds
from .. import plot_colours
from ..engines.timeline import Span, SpanKind

KINDS: dict[str, tuple[SpanKind, ...]] = {
    plot_colours.FORWARD: ("forward",),
    plot_colours.OPTIMISER: ("step",),
    plot_colours.STRAGGLER: ("straggler",),
    plot_colours.COMPUTATION: ("backward",),
    plot_colours.COPIES: ("rebuild", "unshard", "pack", "copy_out"),
    plot_colours.COMPRESSION: ("compress", "recompress", "decompress"),
    plot_colours.INK: ("launch",),
    plot_colours.SMALL: ("wait",),
    plot_colours.QUIET: ("unsynchronized", "search", "queued"),
    plot_colours.HIDDEN: ("join", "order", "broadcast", "bitmap", "all_reduce", "second_all_reduce"),
}
COLOURS = {kind: colour for colour, kinds in KINDS.items() for kind in kinds}
NOT_RUNNING: tuple[SpanKind, ...] = ("straggler", "queued")
"""Kinds of spans before a collective runs."""

HEIGHT, HEIGHT_NOT_RUNNING = 0.8, 0.25
"""Heights of spans in a lane of height 1."""
COLLECTIVES = KINDS[plot_colours.HIDDEN]
DIGIT_WIDTH = 0.008
"""Width of a digit of a bucket's number, as a share of the axes; narrower spans have no number."""


def draw_timeline(prediction: Any, ax: Axes, *, ranks: Sequence[int] | None = None) -> Axes:
    """Draw the median iteration with two lanes per rank, computation and collectives, and frame the critical path.

    A collective is pink while its rank computes, and red while the rank waits: there it is exposed. Of the simulated
    ranks, `ranks` are drawn (None: the first four). The axes are returned.

    Raises:
        ValueError: A rank was not simulated.
    """
    simulated = prediction.timeline.engine_input.ranks
    shown = list(simulated[:4] if ranks is None else ranks)
    if unknown := sorted(set(shown) - set(simulated)):
        raise ValueError(
            f"ranks: expected some of the simulated ranks {list(simulated[:20])}, got {unknown}; ranks that are not "
            "simulated behave like one of these"
        )
    lane_of = {rank: 2 * place for place, rank in enumerate(shown)}
    spans = [span for span in prediction.spans if span.rank in lane_of]
    spans.sort(key=lambda span: span.kind not in NOT_RUNNING)  # running collectives are drawn on top
    ns_per_digit = DIGIT_WIDTH * prediction.timeline.iteration_ns
    waits = [span for span in spans if span.kind == "wait"]
    for span in spans:
        lane = lane_of[span.rank] + (span.stream == "comm")
        ax.broken_barh(*_bar(span, lane), facecolors=COLOURS[span.kind], edgecolors="white", linewidth=0.3)
        if span.kind in COLLECTIVES:
            for part in _overlaps(span, waits):
                ax.broken_barh(*_bar(part, lane), facecolors=plot_colours.EXPOSED)
        number = str(span.bucket)
        runs = span.bucket is not None and span.stream == "comm" and span.kind not in NOT_RUNNING
        if runs and span.duration_ns >= ns_per_digit * len(number):
            middle = (span.start_ns + span.end_ns) / 2e6
            ax.text(middle, lane, number, ha="center", va="center", fontsize=7, color=plot_colours.INK, clip_on=True)
    for span in prediction.critical_path:
        if span.rank in lane_of:
            lane = lane_of[span.rank] + (span.stream == "comm")
            ax.broken_barh(*_bar(span, lane), facecolors="none", edgecolors="black", linewidth=1.2)
    lanes = [f"rank {rank} {what}" for rank in shown for what in ("computes", "network")]
    ax.set_yticks(range(len(lanes)), lanes, fontsize=8)
    ax.set_ylim(len(lanes) - 0.5, -0.5)
    ax.set_xlim(0, max(1.0, prediction.timeline.iteration_ns / 1e6))
    ax.set_xlabel("ms", loc="right")
    low, high = prediction.interval_ns
    ax.set_title(
        f"{milliseconds(prediction.iteration_ns)} ms (90 %: {milliseconds(low)} to {milliseconds(high)}), "
        f"{milliseconds(prediction.exposed_comm_ns)} ms exposed communication; framed: the critical path",
        loc="left",
        fontsize=10,
    )
    ax.spines[["top", "right"]].set_visible(False)
    kinds = dict.fromkeys(span.kind for span in spans if span.kind not in COLLECTIVES)
    names = {kind.replace("_", " "): COLOURS[kind] for kind in kinds}
    names |= {"hidden communication": plot_colours.HIDDEN, "exposed": plot_colours.EXPOSED}
    handles = [Patch(facecolor=colour, edgecolor=plot_colours.QUIET, label=name) for name, colour in names.items()]
    ax.legend(handles=handles, fontsize=7, ncols=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    return ax


def _overlaps(span: Span, others: Sequence[Span]) -> Iterator[Span]:
    """Yield the parts of a span beside other spans of its rank."""
    for other in others:
        start_ns, end_ns = max(span.start_ns, other.start_ns), min(span.end_ns, other.end_ns)
        if span.rank == other.rank and start_ns < end_ns:
            yield span._replace(start_ns=start_ns, end_ns=end_ns)


def _bar(span: Span, lane: int) -> tuple[list[tuple[float, float]], tuple[float, float]]:
    """Return the extents of a span along both axes, as `broken_barh` takes them."""
    height = HEIGHT_NOT_RUNNING if span.kind in NOT_RUNNING else HEIGHT
    return [(span.start_ns / 1e6, span.duration_ns / 1e6)], (lane - height / 2, height)
