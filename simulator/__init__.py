"""The discrete-event twin of `reference`: replays its traces under other buckets, networks and sizes."""

from .fabric import Fabric
from .prediction import Prediction, predict
from .schedule.comm_hooks import CommHook
from .schedule.policy import Policy
from .sweep import sweep
from .timeline import Span
from .workload.variation import Straggler, Variation

__all__ = ["CommHook", "Fabric", "Policy", "Prediction", "Span", "Straggler", "Variation", "predict", "sweep"]
