"""Parts of an iteration with and without overlap of computation and communication (figure 6 of the paper)."""

from functools import cache
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from reference.trace import Iteration, Trace
from simulator import predict

from .drawing import COMPUTATION, EXPOSED, HIDDEN, THIRD, plain, render, save
from .traces_and_fabrics import FABRICS, MODELS

TITLE = "What overlap saves"
SIZE = (5.0, 3.4)
GPUS = 32
CLAIMS = {
    ("ResNet-50", "NCCL-like"): 0.380,
    ("BERT-Large", "NCCL-like"): 0.352,
    ("ResNet-50", "Gloo-like"): 0.268,
    ("BERT-Large", "Gloo-like"): 0.215,
}
"""Time that overlap saves in the paper (section 5.1), as a fraction of the iteration without overlap."""


class Bars(NamedTuple):
    """Milliseconds by model: forward pass, backward pass, communication without overlap, added with overlap."""

    fabric: str
    models: tuple[str, ...]
    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    all_comm_ms: tuple[float, ...]
    added_ms: tuple[float, ...]

    def saved(self) -> list[float]:
        """Time that overlap saves, as a fraction of the iteration without overlap, by model."""
        rows = zip(self.forward_ms, self.backward_ms, self.all_comm_ms, self.added_ms, strict=True)
        return [(comm - added) / (forward + backward + comm) for forward, backward, comm, added in rows]


@cache
def panels() -> list[Bars]:
    """One panel for each fabric, predicted on `GPUS` GPUs with buckets of 25 MiB."""
    return [_bars(fabric) for fabric in FABRICS]


def _bars(fabric: str) -> Bars:
    network = FABRICS[fabric]()
    predictions = [predict(trace(), network, world_size=GPUS) for trace in MODELS.values()]
    without_overlap = [
        predict(ready_at_the_end(trace()), network, world_size=GPUS, plan=one.buckets)
        for trace, one in zip(MODELS.values(), predictions, strict=True)
    ]
    return Bars(
        fabric,
        tuple(MODELS),
        tuple(one.breakdown["forward"] / 1e6 for one in predictions),
        tuple((one.compute_ns - one.breakdown["forward"]) / 1e6 for one in predictions),
        tuple((one.iteration_ns - one.compute_ns) / 1e6 for one in without_overlap),
        tuple((one.iteration_ns - one.compute_ns) / 1e6 for one in predictions),
    )


def ready_at_the_end(trace: Trace) -> Trace:
    """A copy of the trace in which all gradients become ready at the end of the backward pass.

    All collectives then start after the backward pass, and as many run at a time as the fabric allows.
    `Prediction.no_overlap_ns` is not used here, because its collectives run one at a time on every fabric.
    """

    def delayed(iteration: Iteration) -> Iteration:
        ready_ns = tuple(iteration.backward_end_ns for _ in iteration.ready_ns)
        return iteration.model_copy(update={"ready_ns": ready_ns})

    ranks = [rank.model_copy(update={"iterations": tuple(map(delayed, rank.iterations))}) for rank in trace.ranks]
    return trace.model_copy(update={"ranks": tuple(ranks)})


def draw(data: Bars, ax: Axes) -> Axes:
    """Draw two bars for each model, without and with overlap, in percent of the iteration without overlap."""
    places = np.arange(len(data.models))
    times = [np.array(row) for row in (data.forward_ms, data.backward_ms, data.all_comm_ms, data.added_ms)]
    whole = (times[0] + times[1] + times[2]) / 100
    forward, backward, comm, added = (row / whole for row in times)
    for shift, labelled in ((-0.2, True), (0.2, False)):
        ax.bar(places + shift, forward, 0.36, color=THIRD, label="forward" if labelled else None)
        label = "backward" if labelled else None
        ax.bar(places + shift, backward, 0.36, bottom=forward, color=COMPUTATION, label=label)
    ax.bar(places - 0.2, comm, 0.36, bottom=forward + backward, color=HIDDEN, label="communication, no overlap")
    ax.bar(places + 0.2, added, 0.36, bottom=forward + backward, color=EXPOSED, label="added, with overlap")
    ax.set_xticks(places, data.models)
    ax.set_ylabel("% of the iteration without overlap")
    ax.set_ylim(0, 135)
    ax.set_title(f"{data.fabric}, {GPUS} GPUs", loc="left", fontsize=10)
    ax.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    return plain(ax)


def caption() -> str:
    """Caption whose numbers are computed from the data."""
    savings = [
        f"{panel.fabric} {model} {saved:.1%} (paper {CLAIMS[model, panel.fabric]:.1%})"
        for panel in panels()
        for model, saved in zip(panel.models, panel.saved(), strict=True)
    ]
    return (
        f"Simulated on {GPUS} GPUs, 8 in a node, with buckets of 25 MiB. ResNet-50: a trace recorded on a V100 "
        "(batch 32). BERT-Large: synthesised at the peak rates of the V100's data sheet (batch 8, 128 tokens), so "
        "its computation is short. NCCL-like: NVLink inside a node and one 100 Gbit/s adapter for each node "
        "(sources: figures/traces_and_fabrics.py). Gloo-like: a ring with the latency and rate of Gloo as calibrated "
        "on two processes over links of 10 Gbit/s. Overlap saves this fraction of the iteration without overlap: "
        f"{'; '.join(savings)}. Both bars of a pair have the same buckets and the same number of collectives in "
        "flight (NCCL-like: one; Gloo-like: two); without overlap, all gradients become ready at the end of the "
        "backward pass. Overlap saves at most the shorter of the backward pass and the communication, so the saving "
        "is largest where both are equal. We do not know the paper's batch sizes, and its adapters have 100 Gbit/s "
        "for Gloo as well."
    )


def main() -> None:
    """Draw the figure and write its files."""
    save("overlap", render(draw, panels(), size=SIZE))


if __name__ == "__main__":
    main()
