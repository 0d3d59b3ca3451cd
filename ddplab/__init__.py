"""Data-parallel training for PyTorch, small enough to read, and a simulator that predicts how it scales.

Train and record (package `ddplab.reference`, needs torch):

- `DistributedDataParallel`: averages gradients over ranks during the backward pass; replaces torch's class.
- `replace_ddp`: a context in which scripts and trainers get our class for torch's; see `ddplab.replace_ddp`.
- `run_ranks`, `RankPool`: start processes on this machine that form a process group.
- `record`: records when each gradient became ready, as a `Trace`.
- `assign_buckets`: the rule that puts parameters into buckets.
- `compress`, `power_sgd` with `PowerSGDState`: comm hooks.

Predict (package `ddplab.simulator`, without torch):

- `Trace`: a recorded training run; `import_profile` makes one from files of torch's profiler.
- `Fabric`, `Topology`: what collectives cost on a network.
- `predict`: the iteration time for other buckets, networks and world sizes, as a `Prediction`; `explain`: what each
  term of the model adds to it.
- `plan`: how many of which GPU on which network, as a `CapacityPlan`.
- `tune`: which buckets, as a `BucketPlan`, and a time that no buckets can beat.
- `sweep`: a table of predictions; `Policy`: the settings of the reducer, with a `CommHook`; `Straggler`, `Variation`:
  ranks and iterations that differ.

Both together:

- `emulate`: the iteration time of a real reducer on emulated devices and a modelled network.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .emulation.emulate import emulate as emulate
    from .reference.bucketing import assign_buckets as assign_buckets
    from .reference.comm_hooks.compress import compress as compress
    from .reference.comm_hooks.powersgd import PowerSGDState as PowerSGDState
    from .reference.comm_hooks.powersgd import power_sgd as power_sgd
    from .reference.data_parallel import DistributedDataParallel as DistributedDataParallel
    from .reference.launch import RankPool as RankPool
    from .reference.launch import run_ranks as run_ranks
    from .reference.recorder import record as record
    from .reference.trace import Trace as Trace
    from .replace_ddp import replace_ddp as replace_ddp
    from .simulator import BucketPlan as BucketPlan
    from .simulator import CapacityPlan as CapacityPlan
    from .simulator import CommHook as CommHook
    from .simulator import Fabric as Fabric
    from .simulator import Policy as Policy
    from .simulator import Prediction as Prediction
    from .simulator import Straggler as Straggler
    from .simulator import Topology as Topology
    from .simulator import Variation as Variation
    from .simulator import explain as explain
    from .simulator import import_profile as import_profile
    from .simulator import plan as plan
    from .simulator import predict as predict
    from .simulator import sweep as sweep
    from .simulator import tune as tune

__version__ = "0.1.0"

_NAMES = {
    "emulation.emulate": "emulate",
    "reference.bucketing": "assign_buckets",
    "reference.comm_hooks.compress": "compress",
    "reference.comm_hooks.powersgd": "PowerSGDState power_sgd",
    "reference.data_parallel": "DistributedDataParallel",
    "reference.launch": "RankPool run_ranks",
    "reference.recorder": "record",
    "reference.trace": "Trace",
    "replace_ddp": "replace_ddp",
    "simulator": (
        "BucketPlan CapacityPlan CommHook Fabric Policy Prediction Straggler Topology Variation explain "
        "import_profile plan predict sweep tune"
    ),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: torch takes seconds, and `ddplab --help` needs none of them."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return globals().get(name, value)  # `replace_ddp` is a module too, which can be called
