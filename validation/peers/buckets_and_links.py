"""What other predictors need of a row: when its buckets are ready, and how fast its links are."""

from typing import NamedTuple

from ddplab.simulator.schedule.policy import Policy
from ddplab.simulator.schedule.schedule import build_schedule
from ddplab.simulator.workload.compute_times import recorded_model

from ..board import Row

PARTS = "bcdei"
"""Parts of the score whose rows other predictors take: published training of GPUs whose links are known."""
NO_LINKS = "emulated devices, shared cores or steps of a profile: no links between GPUs"
"""Why they do not take the others: (f), (g) and (h)."""
LARGE_BYTES = 2**28
"""Message whose measured all-reduce gives the rate where a row has a table in place of links."""


class Bucket(NamedTuple):
    """A bucket of gradients: nanoseconds from the iteration's start until it is full, and bytes sent."""

    ready_ns: int
    size_bytes: int


class Computation(NamedTuple):
    """One iteration on one GPU without communication; nanoseconds from its start.

    Attributes:
        forward_ns: End of the forward pass.
        buckets: In launch order.
        backward_ns: End of the backward pass.
        end_ns: End of the iteration.
    """

    forward_ns: int
    buckets: tuple[Bucket, ...]
    backward_ns: int
    end_ns: int


class Links(NamedTuple):
    """Links of the GPUs in use.

    Attributes:
        nodes: Number of nodes.
        gpus: GPUs on each node.
        inside: Bus bandwidth of large all-reduces inside a node, bytes per second.
        between: Rate of all network adapters of a node together, in one direction, bytes per second; None: one node.
        inside_s: Seconds of an empty message inside a node.
        between_s: Seconds of an empty message between nodes.
    """

    nodes: int
    gpus: int
    inside: float
    between: float | None
    inside_s: float
    between_s: float


class Ring(NamedTuple):
    """A ring of equal links, one from each GPU to the next."""

    gpus: int
    bytes_per_s: float
    latency_s: float  #: of each step


def computation_of(row: Row) -> Computation:
    """Return the computation and the buckets that the row's settings make of its trace."""
    model = recorded_model(row.load_trace())
    schedule = build_schedule(Policy(**row.settings), model)
    times = model.compute_times[0][-1]
    sizes = {one.bucket: one.size_bytes for one in schedule.collectives if one.kind == "all_reduce"}
    buckets, full_ns = [], 0
    for number, parameters in enumerate(schedule.buckets):
        full_ns = max(full_ns, *(int(times.ready_ns[index]) for index in parameters))  # launched in bucket order
        buckets.append(Bucket(full_ns, sizes[number]))
    return Computation(int(times.forward_ns), tuple(buckets), int(times.backward_end_ns), int(times.compute_ns))


def links_of(row: Row, gpus: int | None = None) -> Links:
    """Return the links of the row's GPUs, or of another number of them.

    A table of measured all-reduces, on one or several nodes, counts as one node with the rate of a large message.
    """
    gpus = gpus or row.gpus
    fabric = row.load_fabric()
    if fabric.topology is None:
        rate = 2 * (gpus - 1) / gpus * LARGE_BYTES / fabric.all_reduce_ns(LARGE_BYTES, gpus) * 1e9
        return Links(1, gpus, rate, None, 0.0, 0.0)
    inner, *outer = fabric.topology.in_use(gpus)
    used = [level for level in outer if level.size > 1]
    return Links(
        nodes=gpus // inner.size,
        gpus=inner.size,
        inside=1e9 / inner.ns_per_byte,
        between=min((1e9 / level.ns_per_byte for level in used), default=None),
        inside_s=inner.latency_ns / 1e9,
        between_s=max((level.latency_ns / 1e9 for level in used), default=0.0),
    )


def ring_of(links: Links) -> Ring:
    """Return NCCL's ring over all GPUs, which enters and leaves each node once, as a ring of equal links."""
    gpus = links.nodes * links.gpus
    if links.between is None:
        return Ring(gpus, links.inside, links.inside_s)
    between = links.nodes / gpus  # part of the hops
    return Ring(gpus, min(links.inside, links.between), between * links.between_s + (1 - between) * links.inside_s)
