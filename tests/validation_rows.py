"""Rows of validation reports, for tests of what is made of them."""

from ddplab.validation.validation_report import Measurement, SpeedCheck, ValidationRow
from simulator import Fabric

from .strategies import iteration, trace_of

FABRIC = Fabric.from_alpha_beta(alpha_ns=100, bytes_per_s=1e9, concurrency=2)
TRACE = trace_of([[iteration(300, (800,), 900, 100)]], [400])


def row(cap_mb: float, measured: int, predicted: int, spread: int = 1) -> ValidationRow:
    return ValidationRow(
        model="m", cap_mb=cap_mb, order="ready", hook="none", buckets=2,
        turns=(Measurement((measured,), SpeedCheck(1, 1)),) * 3, speed_check=SpeedCheck(1, 1),
        measured_ns=2 * measured, quartiles_ns=(2 * measured - spread, 2 * measured + spread),
        paired_ns=measured, paired_quartiles_ns=(measured - spread, measured + spread),
        paired_turns_ns=(measured,) * 3, paired_times_ns=(measured,) * 3,
        predicted_ns=predicted, interval_ns=(predicted - 5, predicted + 5),
        coverage=float(abs(predicted - measured) <= 5), drift=measured / 100 - 1,
        error=predicted / (2 * measured) - 1, paired_error=predicted / measured - 1,
        perfect_scaling_error=-0.5, no_overlap_error=0.5, naive_overlap_error=-0.25, pipelined_overlap_error=0.1,
    )  # fmt: skip
