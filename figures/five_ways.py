"""Iteration time of ResNet-50 with the five ways to average gradients of the Annotated DDP."""

from functools import cache
from typing import NamedTuple

from matplotlib.axes import Axes

from reference.bucketing import ONE_BUCKET, BucketAssignment, bucket_caps, initial_buckets, plan_buckets
from simulator import Prediction, predict
from simulator.plot_colours import COMPUTATION, COPIES, EXPOSED, INK
from simulator.workload.compute_times import recorded_model

from .annotated_ddp import page
from .drawing import render, save

TITLE = "Five ways to average gradients"
SIZE = (7.4, 2.9)
GBIT_PER_S, GPUS = 20, 32
"""The network and the number of GPUs with which the page opens."""


class Way(NamedTuple):
    """One iteration, in milliseconds; the parts add up to it.

    Attributes:
        name: The scene of the page.
        computation_ms: Both passes and the optimiser step.
        copies_ms: Copies into and out of buckets, and launches.
        exposed_ms: Communication that a rank waits for.
    """

    name: str
    computation_ms: float
    copies_ms: float
    exposed_ms: float

    @property
    def iteration_ms(self) -> float:
        """The whole iteration."""
        return self.computation_ms + self.copies_ms + self.exposed_ms


@cache
def panels() -> list[list[Way]]:
    """One panel with all ways, in the order of the page."""
    trace = page.models()["ResNet-50"]
    sizes, keys, caps = trace.sizes_bytes, trace.keys, bucket_caps()
    ready = recorded_model(trace).ready_order
    each = [[index] for index in range(len(sizes))]
    return [
        [
            _without_overlap("Naive", each, in_place=True),
            _without_overlap("Flat", initial_buckets(sizes, [ONE_BUCKET], keys=keys)),
            _with_overlap("Asynchronous", initial_buckets(sizes, [0], keys=keys)),
            _with_overlap("Bucketed", initial_buckets(sizes, caps, keys=keys)),
            _with_overlap("Rebuilt", plan_buckets("ready", sizes, caps, ready_order=ready, keys=keys)),
        ]
    ]


def _without_overlap(name: str, plan: BucketAssignment, *, in_place: bool = False) -> Way:
    prediction = _predicted(plan, in_place=in_place)
    engine_input = prediction.timeline.engine_input
    exposed_ns = int(engine_input.cost_ns.sum())
    copies_ns = prediction.no_overlap_ns - prediction.compute_ns - exposed_ns
    return Way(name, prediction.compute_ns / 1e6, copies_ns / 1e6, exposed_ns / 1e6)


def _with_overlap(name: str, plan: BucketAssignment) -> Way:
    prediction = _predicted(plan)
    parts = prediction.breakdown
    return Way(
        name, prediction.compute_ns / 1e6, (parts["copies"] + parts["launch"]) / 1e6, parts["exposed_comm"] / 1e6
    )


def _predicted(plan: BucketAssignment, *, in_place: bool = False) -> Prediction:
    trace = page.models()["ResNet-50"]
    fabric = page.fabric(trace, GBIT_PER_S)
    return predict(trace, fabric, world_size=GPUS, plan=plan, gradient_as_bucket_view=in_place, assume=False)


def draw(ways: list[Way], ax: Axes) -> Axes:
    """Draw one bar for each way, the first at the top, with its parts and its time."""
    names = [way.name for way in ways]
    begins = [0.0] * len(ways)
    for words, colour, widths in (
        ("computation", COMPUTATION, [way.computation_ms for way in ways]),
        ("copies and launches", COPIES, [way.copies_ms for way in ways]),
        ("exposed communication", EXPOSED, [way.exposed_ms for way in ways]),
    ):
        ax.barh(names, widths, left=begins, color=colour, label=words, height=0.62)
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    for place, (way, end) in enumerate(zip(ways, begins, strict=True)):
        ax.text(end + 3, place, f"{way.iteration_ms:.1f} ms", va="center", fontsize=9, color=INK)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.14 * max(begins))
    ax.set_xlabel("one iteration, ms")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.legend(frameon=False, fontsize=8.5, loc="lower right")
    return ax


def caption() -> str:
    """Caption whose numbers are computed from the data."""
    (ways,) = panels()
    naive, flat, asynchronous, bucketed, rebuilt = (way.iteration_ms for way in ways)
    count = len(page.models()["ResNet-50"].sizes_bytes)
    return (
        f"Buckets and overlap together take {rebuilt:.0f} ms in place of the {naive:.0f} ms of one all-reduce for "
        f"each gradient. Predicted: ResNet-50 on {GPUS} V100s over a ring of {GBIT_PER_S} Gbit/s with 20 us a hop. "
        f"One all-reduce of all gradients takes {flat:.0f} ms. Overlap without buckets takes {asynchronous:.0f} ms, "
        f"as the latency of the network is paid {count} times. Buckets of torch's default cap take {bucketed:.0f} ms "
        f"before the rebuild and {rebuilt:.0f} ms after it. [The Annotated DDP](annotated_ddp.html) shows each as a "
        "timeline that follows network, GPUs and a straggler."
    )


def files() -> dict[str, bytes]:
    """The files of the figure, by format."""
    return render(draw, panels(), size=SIZE)


if __name__ == "__main__":
    save("five_ways", files())
