"""Rows of validation reports, for tests of what is made of them."""

from ddplab.prediction_errors import ValidationRow
from ddplab.simulator import Fabric
from ddplab.training_runs import Turn

from .strategies import iteration, trace_of

FABRIC = Fabric.from_alpha_beta(alpha_ns=100, bytes_per_s=1e9, concurrency=2)
TRACE = trace_of([[iteration(300, (800,), 900, 100)]], [400])


def row(cap_mb: float | str, measured: int, predicted: int, spread: int = 1) -> ValidationRow:
    return ValidationRow(
        model="m", cap_mb=cap_mb, order="ready", hook="none", buckets=2, turns=(Turn((measured,)),) * 3,
        measured_ns=measured, quartiles_ns=(measured - spread, measured + spread),
        predicted_ns=predicted, interval_ns=(predicted - 5, predicted + 5),
        coverage=float(abs(predicted - measured) <= 5), error=predicted / measured - 1,
        perfect_scaling_error=-0.5, no_overlap_error=0.5, naive_overlap_error=-0.25, pipelined_overlap_error=0.1,
    )  # fmt: skip
