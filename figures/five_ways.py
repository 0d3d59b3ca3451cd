"""Iteration time of ResNet-50 with the five ways to average gradients of the Annotated DDP."""

from functools import cache
from typing import NamedTuple

from matplotlib.axes import Axes

from ddplab import Prediction, Trace, predict
from ddplab.demo import EXAMPLE, FABRIC, HOP_NS, RANKS
from ddplab.reference.bucketing import ONE_BUCKET, BucketAssignment, bucket_caps, initial_buckets, plan_buckets
from ddplab.simulator.plot_colours import COMPUTATION, EXPOSED, FORWARD, HIDDEN, INK
from ddplab.simulator.results.breakdown import exposed_intervals
from ddplab.simulator.schedule.schedule import Compute
from ddplab.simulator.workload.compute_times import recorded_model

from .annotated_ddp import page
from .drawing import render, save
from .interactive_timeline.simulate_choices import of_median_iterations

TITLE = "Five ways to average gradients"
SIZE = (7.4, 3.5)
LANE = 0.34
"""Height of a lane; each way has one of the GPU above one of the network."""
KINDS = {
    "forward": (FORWARD, "forward pass, optimiser step"),
    "backward": (COMPUTATION, "backward pass"),
    "hidden": (HIDDEN, "communication beside computation"),
    "exposed": (EXPOSED, "exposed communication"),
}
"""Colour and name of each kind of span; the last two are on the network."""
KIND_OF = {"forward": "forward", "step": "forward", "backward": "backward"}

Span = tuple[str, int, int]
"""A kind of `KINDS`, start and end in nanoseconds."""


class Way(NamedTuple):
    """One iteration.

    Attributes:
        name: The scene of the page.
        iteration_ns: How long it takes.
        spans: What the slowest rank and the network do.
    """

    name: str
    iteration_ns: int
    spans: tuple[Span, ...]

    @property
    def iteration_ms(self) -> float:
        """The whole iteration in milliseconds."""
        return self.iteration_ns / 1e6

    @property
    def exposed_ms(self) -> float:
        """Communication that the rank waits for, in milliseconds."""
        return sum(end - start for kind, start, end in self.spans if kind == "exposed") / 1e6


@cache
def panels() -> list[list[Way]]:
    """One panel with all ways, in the order of the page."""
    trace = page.models()["ResNet-50"]
    sizes, keys, caps = trace.sizes_bytes, trace.keys, bucket_caps()
    ready = recorded_model(trace).ready_order
    each = [[index] for index in range(len(sizes))]
    return [
        [
            _without_overlap("Naive", each),
            _without_overlap("Flat", initial_buckets(sizes, [ONE_BUCKET], keys=keys)),
            _with_overlap("Overlapped", initial_buckets(sizes, [0], keys=keys)),
            _with_overlap("Bucketed", initial_buckets(sizes, caps, keys=keys)),
            _with_overlap("Rebuilt", plan_buckets("ready", sizes, caps, ready_order=ready, keys=keys)),
        ]
    ]


def _without_overlap(name: str, plan: BucketAssignment) -> Way:
    """Return the iteration in which all buckets are averaged after the backward pass; copies are free."""
    trace = of_median_iterations(page.models()["ResNet-50"])
    engine_input = _predicted(trace, plan).timeline.engine_input
    computing = zip(engine_input.schedule.instructions, engine_input.duration_ns[0].tolist(), strict=False)
    took = [(KIND_OF[one.kind], ns) for one, ns in computing if isinstance(one, Compute) and one.kind in KIND_OF]
    every = [*took[:-1], *(("exposed", ns) for ns in engine_input.cost_ns.tolist()), took[-1]]
    spans: list[Span] = []
    for kind, duration_ns in every:
        start_ns = spans[-1][2] if spans else 0
        spans.append((kind, start_ns, start_ns + duration_ns))
    return Way(name, spans[-1][2], tuple(spans))


def _with_overlap(name: str, plan: BucketAssignment) -> Way:
    prediction = _predicted(page.models()["ResNet-50"], plan)
    timeline = prediction.timeline
    collectives = zip(timeline.start_ns.tolist(), timeline.done_ns.tolist(), strict=True)
    computed = (
        (KIND_OF[span.kind], span.start_ns, span.end_ns)
        for span in prediction.spans
        if span.rank == 0 and span.kind in KIND_OF
    )
    hidden = (("hidden", start, end) for start, end in collectives)
    exposed = (("exposed", start, end) for start, end in exposed_intervals(timeline))
    return Way(name, prediction.iteration_ns, (*computed, *hidden, *exposed))


def _predicted(trace: Trace, plan: BucketAssignment) -> Prediction:
    return predict(trace, FABRIC, world_size=RANKS, plan=plan, broadcast_buffers=False, assume=False)


def draw(ways: list[Way], ax: Axes) -> Axes:
    """Draw one timeline for each way, the first at the top, and its time."""
    for place, way in enumerate(ways):
        for kind, (colour, words) in KINDS.items():
            top = place if kind in ("hidden", "exposed") else place - LANE
            pieces = [(start / 1e6, (end - start) / 1e6) for one, start, end in way.spans if one == kind]
            ax.broken_barh(pieces, (top, LANE), color=colour, linewidth=0, label="" if place else words)
        ax.text(way.iteration_ms + 3, place - 0.02, f"{way.iteration_ms:.1f} ms", va="center", color=INK)
        exposed = f"{way.exposed_ms:.0f} ms exposed"
        ax.text(way.iteration_ms + 3, place + 0.33, exposed, va="center", fontsize=8, color=EXPOSED)
    ax.set_yticks(range(len(ways)), [way.name for way in ways])
    ax.invert_yaxis()
    ax.set_xlim(0, 1.16 * max(way.iteration_ms for way in ways))
    ax.set_xlabel("one iteration, ms; of each way, the GPU above the network")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.legend(frameon=False, fontsize=8.5, loc="lower right")
    return ax


def caption() -> str:
    """Caption whose numbers are computed from the data."""
    (ways,) = panels()
    naive, flat, overlapped, bucketed, rebuilt = (way.iteration_ms for way in ways)
    count = len(page.models()["ResNet-50"].sizes_bytes)
    return (
        f"Buckets and overlap together take {rebuilt:.0f} ms in place of the {naive:.0f} ms of one all-reduce for "
        f"each gradient. Predicted: {EXAMPLE}, a ring with {HOP_NS // 1000} us a hop; copies and launches count as "
        f"free. One all-reduce of all gradients takes {flat:.0f} ms. Overlap without buckets takes {overlapped:.0f} "
        f"ms, as the latency of the network is paid {count} times. Buckets of torch's default cap take "
        f"{bucketed:.0f} ms before the rebuild and {rebuilt:.0f} ms after it. [The Annotated "
        "DDP](annotated_ddp.html) shows each as a timeline that follows network, GPUs and a straggler; in `ddplab "
        "learn` you write them."
    )


def files() -> dict[str, bytes]:
    """The files of the figure, by format."""
    return render(draw, panels(), size=SIZE)


if __name__ == "__main__":
    save("five_ways", files())
