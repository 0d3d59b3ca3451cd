"""Conformance in virtual time: checks of a data-parallel class that need a simulated network.

`reference.conformance` loads them through the entry point `ddplab.conformance`.
"""

from collections.abc import Mapping

from reference.conformance.bench import Check

from .overlap import check_overlap
from .timing import check_timing

CHECKS: Mapping[str, Check] = {"any timing": check_timing, "overlap": check_overlap}
"""Checks in virtual time, by name."""
