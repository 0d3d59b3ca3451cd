"""Data-parallel training for PyTorch, small enough to read, and a simulator that predicts how it scales.

Train and record (package `reference`, needs torch):

- `DistributedDataParallel`: averages gradients over ranks during the backward pass; replaces torch's class.
- `replace_ddp`: a context in which scripts and trainers get our class for torch's; see `ddplab.replace_ddp`.
- `run_ranks`: starts processes on this machine that form a process group.
- `record`: records when each gradient became ready, as a `Trace`.
- `assign_buckets`: the rule that puts parameters into buckets.

Predict (package `simulator`, without torch):

- `Trace`: a recorded training run; `import_profile` makes one from files of torch's profiler.
- `Fabric`: what collectives cost on a network.
- `predict`: the iteration time for other buckets, networks and world sizes, as a `Prediction`.
- `plan`: how many of which GPU on which network, as a `simulator.CapacityPlan`.
- `tune`: which buckets, as a `simulator.BucketPlan`, and a time that no buckets can beat.
- `sweep`: a table of predictions; `Policy`: the settings of the reducer.

Both together:

- `emulate`: the iteration time of a real reducer on emulated devices and a modelled network.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .name_clashes import check_own_packages

if TYPE_CHECKING:
    from reference.bucketing import assign_buckets as assign_buckets
    from reference.data_parallel import DistributedDataParallel as DistributedDataParallel
    from reference.launch import run_ranks as run_ranks
    from reference.recorder import record as record
    from reference.trace import Trace as Trace
    from simulator import Fabric as Fabric
    from simulator import Policy as Policy
    from simulator import Prediction as Prediction
    from simulator import import_profile as import_profile
    from simulator import plan as plan
    from simulator import predict as predict
    from simulator import tune as tune
    from simulator.sweep import sweep as sweep

    from .emulation.emulate import emulate as emulate
    from .replace_ddp import replace_ddp as replace_ddp

_NAMES = {
    "reference.bucketing": "assign_buckets",
    "reference.data_parallel": "DistributedDataParallel",
    "reference.launch": "run_ranks",
    "reference.recorder": "record",
    "reference.trace": "Trace",
    "simulator": "Fabric Policy Prediction import_profile plan predict sweep tune",
    "ddplab.emulation.emulate": "emulate",
    "ddplab.replace_ddp": "replace_ddp",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: torch takes seconds, and pytest's plugin needs none of them."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_own_packages()
    value = getattr(import_module(_MODULES[name]), name)
    return globals().get(name, value)  # `replace_ddp` is a module too, which can be called
