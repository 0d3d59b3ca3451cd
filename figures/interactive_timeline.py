"""Interactive timeline of ResNet-50: a page that computes in the browser, without a kernel and without a network."""

from functools import cache

from reference.files.writing import write_atomically
from simulator import Fabric
from simulator.interactive_timeline.page import interactive_page
from simulator.interactive_timeline.simulate_choices import InteractiveIteration
from simulator.workload.default_gpu_costs import default_processor, memory_of

from .drawing import FOLDER
from .traces_and_fabrics import resnet50

PATH = FOLDER / "interactive_timeline.html"
LATENCY_NS = 20_000
HEADING = "Drag the buckets: one iteration of ResNet-50"
GUIDANCE = """\
<p>The backward pass computes 161 gradients, which fill the buckets from bucket 0 upwards. An all-reduce averages each
full bucket over all ranks. Drag the boundaries between the buckets, or move them with the arrow keys.</p>
<ul>
<li>Drag the highest boundary up, so that the last bucket becomes small. Which numbers change, and why?</li>
<li>Make all buckets small with the bucket cap. What does that cost on 16 ranks, and what on 256?</li>
<li>Choose the order <em>forward</em>. Which gradients does bucket 0 wait for?</li>
<li>Slow the last rank down with the straggler's factor. Which numbers can a faster network still reduce?</li>
</ul>"""
NOTES = """\
<p>Ready times: recorded on a V100, batch 32, the iteration of median duration. Network: a ring, 20 microseconds a
hop; one all-reduce at a time. Copies and launches take the usual times on a V100. Collectives do not slow the
computation down. Every number equals that of <code>simulator.predict</code>, to the nanosecond.</p>"""


def fabric(gbit_per_s: float) -> Fabric:
    """Return a ring with 20 microseconds a hop, and the usual costs of copies and launches on a V100.

    Collectives do not slow the computation down, because the browser computes the closed form for constant speeds.
    """
    memory = memory_of("V100")
    assert memory is not None
    processor = default_processor(memory).model_copy(update={"contention": ()})
    ring = Fabric.from_alpha_beta(alpha_ns=LATENCY_NS, bytes_per_s=gbit_per_s * 1e9 / 8)
    return ring.model_copy(update={"processor": processor})


@cache
def iteration() -> InteractiveIteration:
    """ResNet-50 on a V100, the iteration of median duration."""
    return InteractiveIteration(resnet50(), fabric, title="ResNet-50")


def page() -> str:
    """Return the page."""
    return interactive_page(iteration(), heading=HEADING, guidance=GUIDANCE, notes=NOTES)


def main() -> None:
    """Write the page."""
    write_atomically(PATH, page().encode())


if __name__ == "__main__":
    main()
