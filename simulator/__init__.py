"""The discrete-event twin of `reference`: replays its traces under other buckets, networks and sizes."""

from .fabric import Fabric
from .iteration.comm_hook import CommHook
from .iteration.policy import Policy
from .prediction import Prediction, predict
from .spans import Span
from .sweep import sweep
from .workload.variation import Straggler, Variation

__all__ = ["CommHook", "Fabric", "Policy", "Prediction", "Span", "Straggler", "Variation", "predict", "sweep"]
