"""Plot of memory over an iteration: parameters, buckets and all-reduces, gradients beside buckets, activations."""

from itertools import accumulate
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ...reference.trace import Trace
from ..capacity.memory import memory_use
from ..plot_colours import COMPUTATION, COPIES, EXPOSED, INK, OPTIMISER, QUIET
from ..schedule.policy import Policy
from ..schedule.schedule import Compute


def draw_memory(prediction: Any, trace: Trace, policy: Policy, ax: Axes) -> Axes:
    """Draw what the first simulated rank holds in the median iteration, without states of the optimiser.

    Activations grow evenly in the forward pass, and are counted whenever a gradient is ready. Gradients beside the
    buckets stay until the next iteration. The peak includes what one operation needs for a moment.

    The trace has the memory of a step; the grouping is "buckets", and `sync_every` is 1. The axes, below those of the
    timeline, are returned.
    """
    moments, layers = memory_over_time(prediction, trace, policy)
    colours = OPTIMISER, QUIET, COPIES, COMPUTATION
    ax.stackplot(np.array(moments) / 1e6, np.array([*layers.values()]) / 1e9, labels=layers, colors=colours)
    sizes = [sum(trace.workload.parameters[one].size_bytes for one in bucket) for bucket in prediction.buckets]
    places = [*accumulate(sizes, initial=layers["parameters, buffers"][0])]
    for span in prediction.spans:
        if span.rank == prediction.spans[0].rank and span.stream == "comm" and span.bucket is not None:
            place = places[span.bucket] / 1e9, sizes[span.bucket] / 1e9
            ax.broken_barh([(span.start_ns / 1e6, span.duration_ns / 1e6)], place, facecolors=EXPOSED)
    ax.fill_between([], [], color=EXPOSED, label="launched buckets, until averaged")
    peak_gb = (memory_use(trace, policy, "sgd").peak_bytes or 0) / 1e9
    ax.axhline(peak_gb, color=INK, linestyle="--", linewidth=1, label=f"peak, {peak_gb:.2f} GB")
    ax.set_title("GB on each GPU, without states of the optimiser", loc="left", fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=7, ncols=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    return ax


def memory_over_time(prediction: Any, trace: Trace, policy: Policy) -> tuple[list[int], dict[str, list[int]]]:
    """Return moments in nanoseconds, and the bytes of each layer at each moment.

    Between the moments at which buckets are complete, gradients become ready as they did in the trace.
    """
    timeline, recorded, memory = prediction.timeline, trace.ranks[0].iterations[-1], trace.workload.memory
    assert memory is not None
    steps = [one.kind if isinstance(one, Compute) else None for one in timeline.engine_input.schedule.instructions]
    ended = timeline.end_ns[0].tolist()
    forward = steps.index("forward")
    start, end = ended[forward - 1] if forward else 0, ended[forward]
    *backward, last = (ns for kind, ns in zip(steps, ended, strict=True) if kind == "backward")
    ready = {index: ns for index, ns in enumerate(recorded.ready_ns) if ns is not None}
    complete = accumulate((max(ready.get(one, 0) for one in bucket) for bucket in prediction.buckets), max)
    order = sorted(ready, key=ready.__getitem__)
    knots = [recorded.backward_start_ns, *complete], [end, *backward]
    at_ready = np.interp([ready[one] for one in order], *knots).astype(int).tolist()
    parts, sizes = memory_use(trace, policy, "sgd").parts, [one.size_bytes for one in trace.workload.parameters]
    gradients = list(accumulate(0 if policy.gradient_as_bucket_view else sizes[one] for one in order))
    moments = [0, start, end, *at_ready, last, timeline.iteration_ns]
    return moments, {
        "parameters, buffers": [sum(parts[one] or 0 for one in ("parameters", "frozen parameters", "buffers"))]
        * len(moments),
        "buckets": [sum(sizes)] * len(moments),
        "gradients beside buckets": [0, 0, 0, *gradients, gradients[-1], gradients[-1]],
        "activations": [0, 0, memory.kept_bytes, *(memory.ready_bytes[one] for one in order), 0, 0],
    }
