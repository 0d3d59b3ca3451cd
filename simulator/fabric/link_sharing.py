"""Link sharing: how much collectives that run at the same time slow each other down on the network."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from pydantic import Field

from ...reference.files.reading import Schema
from ...reference.files.value_ranges import Bytes, Multiple

LEAST_FACTOR, LARGEST_FACTOR = 0.5, 100.0
"""Limits of `Sharing.factor`. A link that was idle may let a burst pass at once, so short messages take longer by a
large factor when two run at a time."""


class LinkShare(NamedTuple):
    """How a collective shares the link with other collectives."""

    slow_down: float = 1.0  #: factor on its duration while another collective of the same weight runs
    weight: float = 1.0  #: larger if it slows other collectives more; only the ratio of two weights counts


class Sharing(Schema):
    """How a collective of `size_bytes` shares the link with another collective.

    Gloo sends the segments of two messages in turn, and a larger message has larger segments, up to 1 MiB.
    """

    size_bytes: Bytes
    """message of one rank, bytes; chosen in the calibration"""
    factor: float = Field(ge=LEAST_FACTOR, le=LARGEST_FACTOR, allow_inf_nan=False)
    """time with two at a time as a multiple of the time alone; measured by the calibration"""
    weight: Multiple = 1.0
    """larger if a message of this size slows messages of other sizes more; only the ratio of two weights counts;
    measured by the calibration, 1 if all sizes are equal in this"""


CLEARLY_SLOWED = 1.2
"""Factor above which the slow-down by a second collective is large enough to compare slow-downs."""


def relative_weights(
    alone_ns: Mapping[int, float], two_at_a_time_ns: Mapping[int, float], beside_larger_ns: Mapping[int, float]
) -> list[float]:
    """Return the weight of each message size, in ascending order of sizes; the smallest size has weight 1.

    A message beside the next larger size is slowed more than beside its own size. The ratio of the two slow-downs is
    the ratio of the weights, which is at least 1 and at most the ratio of the sizes. Where a second message hardly
    slows a message, the ratio cannot be measured and counts as 1.

    Args:
        alone_ns: Duration of one collective by size.
        two_at_a_time_ns: Duration of one collective while another of the same size runs, by size.
        beside_larger_ns: Duration of one collective while another of the next larger size runs; no largest size.
    """
    sizes = sorted(two_at_a_time_ns)
    weights = [1.0] * len(sizes[:1])
    for smaller, larger in pairwise(sizes):
        own, next_larger = (ns[smaller] / alone_ns[smaller] for ns in (two_at_a_time_ns, beside_larger_ns))
        ratio = (next_larger - 1) / (own - 1) if own > CLEARLY_SLOWED else 1.0
        weights.append(weights[-1] * min(max(ratio, 1.0), larger / smaller))
    return weights


def measured_share(rows: Sequence[Sharing], size_bytes: int) -> LinkShare:
    """Return how a collective shares the link by measured rows; outside their sizes, as the nearest size.

    Between sizes the factor, at least 1, is interpolated linearly, and the weight by logarithms.
    """
    ordered = sorted(rows, key=attrgetter("size_bytes"))
    sizes = [row.size_bytes for row in ordered]
    slow_down = np.interp(size_bytes, sizes, [row.factor for row in ordered])
    logs = np.log(np.maximum(1, sizes))
    weight = np.exp(np.interp(np.log(max(1, size_bytes)), logs, np.log([row.weight for row in ordered])))
    return LinkShare(max(1.0, float(slow_down)), float(weight))
