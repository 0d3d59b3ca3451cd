"""The page without a kernel: one HTML file with the widget, its data, and the closed form in JavaScript.

The file makes no network requests. `replay.js` computes the answers from ready times and costs that the simulator
computed beforehand; a test compares them with the answers of `simulator.predict`.
"""

import json
from string import Template

from ..fabric import Fabric
from ..fabric.algorithms import Cost, ring
from ..step_costs import charged_fabric
from .browser_code import FOLDER, script, style
from .simulate_choices import InteractiveIteration


def interactive_page(iteration: InteractiveIteration, *, heading: str, guidance: str, notes: str) -> str:
    """Return the page.

    Args:
        iteration: The iteration to show, of a trace of one rank. Its fabric must be of the kind that
            `Fabric.from_alpha_beta` makes: a ring of equal links, one collective at a time, no slow-downs.
        heading: Heading of the page, as HTML.
        guidance: Paragraphs between heading and widget, as HTML.
        notes: Paragraphs below the widget, as HTML.

    Raises:
        ValueError: The trace or a fabric is of another kind.
    """
    document = iteration.document() | {"replay": replay_costs(iteration)}
    return Template((FOLDER / "page.html").read_text()).substitute(
        heading=heading,
        guidance=guidance,
        notes=notes,
        style=style(),
        data=json.dumps(document, separators=(",", ":")).replace("<", "\\u003c"),
        script="\n".join([script(), (FOLDER / "replay.js").read_text()]),
    )


def replay_costs(iteration: InteractiveIteration) -> dict[str, object]:
    """Return the compute times and costs from which `replay.js` computes every answer; times in nanoseconds.

    `all_reduce[i][j]` has the latency and the time per byte for the i-th world size and the j-th bandwidth.
    """
    model = iteration.model
    if len(model.compute_times) > 1 or model.buffers:
        raise ValueError(
            f"trace: expected one rank and a model without buffers, got {len(model.compute_times)} ranks and "
            f"{len(model.buffers)} buffers; use InteractiveTimeline in a notebook"
        )
    fabrics = [charged_fabric(iteration.fabric(gbit), model) for gbit in iteration.choices.gbit_per_s]
    processor = fabrics[0].processor
    if any(fabric.processor != processor for fabric in fabrics):
        raise ValueError("fabric: expected the same processor costs for every bandwidth")
    times = model.compute_times[0][0]
    return {
        "forward_ns": int(times.forward_ns),
        "ready_ns": times.ready_ns.tolist(),
        "backward_end_ns": int(times.backward_end_ns),
        "step_ns": int(times.step_ns),
        "pack_ns": [processor.pack(size) for size in iteration.trace.sizes_bytes],
        "copy_out_ns": [processor.copy_out(size) for size in iteration.trace.sizes_bytes],
        "launch_ns": [processor.launch_on(world_size) for world_size in iteration.choices.world_sizes],
        "all_reduce": [
            [_ring_cost(fabric, world_size)[:2] for fabric in fabrics] for world_size in iteration.choices.world_sizes
        ],
    }


def _ring_cost(fabric: Fabric, world_size: int) -> Cost:
    """Return the cost of an all-reduce, which the browser computes in the same order of operations as `Cost`."""
    own = {name: getattr(fabric, name) for name in ("topology", "processor", "source")}
    plain = Fabric.from_alpha_beta(0, 1.0).model_copy(update=own)
    if fabric != plain or fabric.topology is None or len(fabric.topology.levels) != 1:
        raise ValueError("fabric: expected one that Fabric.from_alpha_beta made, got another kind")
    if fabric.processor.contention:
        raise ValueError("fabric: expected no slow-downs; use InteractiveTimeline in a notebook")
    return ring(fabric.topology.in_use(world_size))
