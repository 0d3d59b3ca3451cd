"""Variation: how iterations and ranks are to differ."""

from typing import Literal

from pydantic import Field

from reference.records import Settings

Kind = Literal["recorded", "resampled", "correlated", "fitted"]


class Variation(Settings):
    """How the iterations that are predicted come from those that were recorded."""

    kind: Kind = Field(
        default="recorded",
        description="`recorded`: each iteration as it was, rank r as recorded rank r modulo their number; "
        "`resampled`: every rank draws whole iterations; `correlated`: every rank draws each gap between gradients, "
        "neighbours alike; `fitted`: every rank's typical iteration times a lognormal factor",
    )
    iterations: int = Field(default=200, ge=1, description="to draw; `recorded` takes as many as there are")
    correlation: float | None = Field(
        default=None,
        ge=-1,
        le=1,
        description="of neighbouring gaps, for `correlated`: 1 makes iterations slow as a whole; None: the trace's",
    )
    seed: int = Field(default=0, ge=0, description="of all draws")


class Straggler(Settings):
    """A rank that computes more slowly than was recorded."""

    rank: int | None = Field(default=None, ge=0, description="which; None: another one in each iteration, at random")
    factor: float = Field(ge=1, allow_inf_nan=False, description="how many times as long its computation takes")
