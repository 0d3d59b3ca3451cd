"""Discrete-event simulator of data-parallel training: predicts iteration times from recorded traces."""

from ..reference.trace import Trace as Trace
from .capacity.plan import CapacityPlan as CapacityPlan
from .capacity.plan import plan as plan
from .capacity.scaling import Price as Price
from .cost_terms import explain as explain
from .engines.timeline import Span as Span
from .fabric import Fabric as Fabric
from .fabric import Topology as Topology
from .inputs_with_default_costs import assume_gpu as assume_gpu
from .predicted_iteration import Prediction as Prediction
from .prediction import predict as predict
from .profiler_import.trace_of_profile import import_profile as import_profile
from .schedule.comm_hook_messages import CommHook as CommHook
from .schedule.policy import Policy as Policy
from .sweep import sweep as sweep
from .tuning.bucket_plan import BucketPlan as BucketPlan
from .tuning.tune import tune as tune
from .workload.variation import Straggler as Straggler
from .workload.variation import Variation as Variation
