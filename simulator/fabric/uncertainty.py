"""Uncertainty: the half-width of the band that holds nine in ten costs of a collective, as a fraction of the cost."""

from collections.abc import Mapping
from math import log2

import numpy as np

from .algorithms import Library
from .extrapolation import extrapolated_table, growth_of
from .measured_tables import Table
from .topology import Topology

LINKS_ERROR = 0.14
"""Relative error of costs computed from links, and of a world size between two measured ones."""
BAND = 0.9
"""Fraction of the costs that the error band contains."""
NORMAL_HALF_BAND = 1.645
"""Half-width of the band that holds 90 % of normally distributed values, in standard deviations."""
LARGEST_ERROR = 0.9
"""Upper limit of the relative error, so that the band does not reach zero."""
ERROR_PER_DOUBLING = 0.05
"""Relative error added by each further doubling beyond the measured world sizes."""


def table_error(tables: Mapping[int, Table], world_size: int, extrapolation_error: float) -> float:
    """Return the relative error at a world size that was not measured.

    Interpolation and extrapolation add to the spread of the nearest table. `extrapolation_error` is the result of the
    function of that name.
    """
    nearest = min(tables, key=lambda measured: abs(log2(world_size / measured)))
    if min(tables) < world_size < max(tables):
        return min(tables[nearest].spread + LINKS_ERROR, LARGEST_ERROR)
    further_doublings = max(abs(log2(world_size / nearest)) - 1, 0.0)
    error = tables[nearest].spread + max(LINKS_ERROR, extrapolation_error) + ERROR_PER_DOUBLING * further_doublings
    return min(error, LARGEST_ERROR)


def extrapolation_error(tables: Mapping[int, Table], library: Library, topology: Topology | None) -> float:
    """Return the 90th percentile of the relative error of extrapolating to the largest measured world size.

    The costs at the largest world size are extrapolated from the smaller ones and compared with the measurements, at
    message sizes within the range of both. 0 if there are no common sizes, or fewer than two smaller world sizes: one
    of them does not show how costs grow, so its error would say nothing of an extrapolation from both.
    """
    *smaller, largest = sorted(tables)
    if len(smaller) < 2:
        return 0.0
    inputs = {n: tables[n] for n in smaller}
    predicted = extrapolated_table(inputs, largest, growth_of(inputs, library, topology))
    measured = tables[largest]
    common = (measured.sizes_bytes >= predicted.sizes_bytes[0]) & (measured.sizes_bytes <= predicted.sizes_bytes[-1])
    if not common.any():
        return 0.0
    times = np.maximum(measured.ns[common], 1)
    return float(np.quantile(np.abs(predicted.costs_ns(measured.sizes_bytes[common]) / times - 1), BAND))
