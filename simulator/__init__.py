"""Discrete-event simulator of data-parallel training: predicts iteration times from recorded traces."""

from typing import TYPE_CHECKING, Any

from reference.trace import Trace

from .fabric import Fabric, Topology
from .kineto.trace_of_profile import import_profile
from .prediction import Prediction, predict
from .schedule.comm_hooks import CommHook
from .schedule.policy import Policy
from .sweep import sweep
from .timeline import Span
from .workload.compute_times import Straggler, Variation

if TYPE_CHECKING:
    from .emulation.emulate import emulate

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
    "emulate",
    "import_profile",
    "predict",
    "sweep",
]


def __getattr__(name: str) -> Any:
    """Load `emulate`, which needs torch, when it is first used."""
    if name == "emulate":
        from .emulation.emulate import emulate

        return emulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
