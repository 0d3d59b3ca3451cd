"""Discrete-event simulator of data-parallel training: predicts iteration times from recorded traces."""

from ..reference.trace import Trace
from .capacity.plan import CapacityPlan, plan
from .capacity.scaling import Price
from .cost_terms import explain
from .engines.timeline import Span
from .fabric import Fabric, Topology
from .inputs_with_default_costs import assume_gpu
from .predicted_iteration import Prediction
from .prediction import predict
from .profiler_import.trace_of_profile import import_profile
from .schedule.comm_hook_messages import CommHook
from .schedule.policy import Policy
from .sweep import sweep
from .tuning.bucket_plan import BucketPlan
from .tuning.tune import tune
from .workload.variation import Straggler, Variation

__all__ = [
    "BucketPlan",
    "CapacityPlan",
    "CommHook",
    "Fabric",
    "Policy",
    "Prediction",
    "Price",
    "Span",
    "Straggler",
    "Topology",
    "Trace",
    "Variation",
    "assume_gpu",
    "explain",
    "import_profile",
    "plan",
    "predict",
    "sweep",
    "tune",
]
