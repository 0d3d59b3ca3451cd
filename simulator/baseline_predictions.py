"""Baselines: simpler predictions of an iteration, beside which those of the simulator stand.

- *perfect scaling*: computation alone, the mean over the ranks
- *no overlap*: all communication after the backward pass; copies are free
- *naive overlap*: `end = max(ready, previous end) + cost` for each bucket; copies are free and nothing slows down
- *pipelined overlap*: the simulator with copies, launches and as many collectives at a time as the library runs, but
  without the slow-downs of computation and of collectives
"""

from typing import Any

from ..reference.trace import Trace
from .fabric import Fabric, Processor
from .prediction import predict

BASELINES = ("perfect scaling", "no overlap", "naive overlap", "pipelined overlap")


def baselines_ns(trace: Trace, fabric: Fabric, *, world_size: int, **settings: Any) -> dict[str, int]:
    """Nanoseconds of an iteration by baseline; arguments as for `predict`, but no cost is assumed."""
    free = fabric.model_copy(update={"processor": Processor(), "concurrency": 1, "sharing": ()})
    naive = predict(trace, free, world_size=world_size, assume=False, **settings)
    without_slow_downs = fabric.with_processor(slow_down=1.0, slow_down_error=0.0, copy_error=0.0, launch_error=0.0)
    pipelined = predict(trace, without_slow_downs, world_size=world_size, assume=False, **settings)
    return {
        "perfect scaling": naive.compute_ns,
        "no overlap": naive.no_overlap_ns,
        "naive overlap": naive.iteration_ns,
        "pipelined overlap": pipelined.iteration_ns,
    }
