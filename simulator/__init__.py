"""Discrete-event simulator of data-parallel training: predicts iteration times from recorded traces."""

from typing import Any

from reference.trace import Trace

from .cost_terms import explain
from .engines.timeline import Span
from .fabric import Fabric, Topology
from .prediction import Prediction, predict
from .profiler_import.trace_of_profile import import_profile
from .schedule.comm_hook_messages import CommHook
from .schedule.policy import Policy
from .sweep import sweep
from .tuning.plan import Plan
from .tuning.tune import tune
from .workload.compute_times import Straggler, Variation
from .workload.default_gpu_costs import assume_gpu

__all__ = [
    "CommHook",
    "Fabric",
    "Plan",
    "Policy",
    "Prediction",
    "Span",
    "Straggler",
    "Topology",
    "Trace",
    "Variation",
    "assume_gpu",
    "emulate",
    "explain",
    "import_profile",
    "predict",
    "sweep",
    "tune",
]


def emulate(*arguments: Any, **settings: Any) -> Any:
    """`ddplab.emulate` under its earlier name, for scripts that use it; needs torch, as no other function here."""
    from ddplab import emulate as emulate_with_torch

    return emulate_with_torch(*arguments, **settings)
