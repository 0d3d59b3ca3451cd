"""Discrete-event simulator of data-parallel training: predicts iteration times from recorded traces."""

from reference.trace import Trace

from .fabric import Fabric, Topology
from .prediction import Prediction, predict
from .schedule.comm_hooks import CommHook
from .schedule.policy import Policy
from .sweep import sweep
from .timeline import Span
from .workload.compute_times import Straggler, Variation

__all__ = [
    "CommHook",
    "Fabric",
    "Policy",
    "Prediction",
    "Span",
    "Straggler",
    "Topology",
    "Trace",
    "Variation",
    "predict",
    "sweep",
]
