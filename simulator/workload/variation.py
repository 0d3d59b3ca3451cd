"""Variation: how iterations differ from each other and ranks from ranks, as the user describes it."""

from typing import Literal

from pydantic import Field

from ...reference.files.reading import Schema
from ...reference.files.value_ranges import Iterations, Rank, SlowdownFactor

VariationKind = Literal["recorded", "resampled", "fitted", "slowest"]


class Variation(Schema):
    """How the simulated iterations are generated from the recorded ones."""

    kind: VariationKind = "recorded"
    """how iterations are generated, a name: `recorded` (as recorded, with recorded ranks repeated in turn),
    `resampled` (a random recorded iteration for each rank), `fitted` (each rank's median iteration multiplied by a
    lognormal factor), or `slowest` (each rank's median iteration, and the last rank as slow as the slowest of all,
    which vary independently); chosen by the user"""
    iterations: Iterations = 200
    """iterations to generate, a count (ignored by `recorded`, which has those of the trace, and `slowest`, which has
    101); chosen by the user"""
    device_spread: float = Field(default=0.0, ge=0, le=0.2)
    """standard deviation of the speeds of equal devices, a fraction: the last rank is as slow as the slowest of all
    ranks usually is, and the recorded device is one of them; from measurements of many devices"""
    jitter: float | None = Field(default=None, ge=0, le=0.5)
    """for `slowest`, standard deviation of one rank's iterations, a fraction (None: the recorded iterations' own
    variation, if the trace has at least 20); from the iterations of one device"""


RECORDED = Variation()
"""Iterations as they were recorded."""


class Straggler(Schema):
    """A rank that computes more slowly than was recorded."""

    rank: Rank | None = None
    """slow rank, a rank (None: a random one in each iteration); chosen by the user"""
    factor: SlowdownFactor
    """computation time, a multiple of the recorded time; from the log of a slow node"""
