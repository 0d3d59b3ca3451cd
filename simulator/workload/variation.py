"""Variation: how iterations and ranks are to differ."""

from typing import Literal

from pydantic import Field

from reference.records import Settings

Kind = Literal["recorded", "resampled", "correlated", "fitted"]


class Variation(Settings):
    """How the iterations that are predicted come from those that were recorded."""

    kind: Kind = Field(
        default="recorded",
        description="how iterations are drawn, a name: `recorded`, each as it was, rank r as recorded rank r modulo "
        "their number; `resampled`, every rank whole iterations; `correlated`, every rank each gap of gradients, "
        "neighbours alike; `fitted`, every rank's typical one times a lognormal factor; from the trace's iterations",
    )
    iterations: int = Field(
        default=200, ge=1, description="how many to draw, a count (`recorded` has as many as there are); the user's"
    )
    correlation: float | None = Field(
        default=None,
        ge=-1,
        le=1,
        description="of neighbouring gaps, from -1 to 1 (iterations slow as a whole); None: as in the trace",
    )
    seed: int = Field(default=0, ge=0, description="decides all draws, no unit; the user's choice")


class Straggler(Settings):
    """A rank that computes more slowly than was recorded."""

    rank: int | None = Field(
        default=None, ge=0, description="which, a rank, None: another one in each iteration; the user's question"
    )
    factor: float = Field(
        ge=1, allow_inf_nan=False, description="its computation's time, a multiple of the recorded; a slow node's log"
    )
