"""The runs on emulated V100s from which the paper's figures are drawn again.

In virtual time: ddplab's reducer trains with real gradients, hooks and buckets, devices take the recorded times of a
V100, and collectives take the times of a fabric of `traces_and_fabrics` (`ddplab.emulate`). One rank stands for
all GPUs that repeat the same trace. `python -m figures.measure emulated` writes the times to
`data/emulated_v100s.csv`; nothing in them is random, and no other load on the machine changes them.

By the clock: processes with Gloo and links between them, from the committed runs of `python -m validation.emulated`.
"""

import csv
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from ddplab import Prediction, Trace, emulate, predict
from ddplab.prediction_errors import ValidationRow
from ddplab.reference.trace import Iteration
from validation.part_fg_runs import CommittedRun, committed_runs

from .drawing import DATA
from .traces_and_fabrics import FABRICS, MODELS

PATH = DATA / "emulated_v100s.csv"
CLOCK_RUNS = {
    "4 GPUs": "emulated-v100-resnet50-10gbit-4ranks",
    "8 GPUs": "emulated-v100-resnet50-10gbit-8ranks",
    "16 GPUs, nodes of 2": "emulated-v100-resnet50-nodes-of-2-16ranks",
}
"""Committed runs of ResNet-50 on emulated V100s, by number of ranks."""
BY_CLOCK = (
    "ResNet-50 on emulated V100s that sleep for the times of a recorded trace (batch 32), with real processes, "
    "gradients, Gloo and links of 10 Gbit/s, or uplinks of 5 Gbit/s from nodes of 2; dilated 4, 8 and 16 times and "
    "with 1/16 or 1/32 of the bytes to fit two cores (`validation/runs`)"
)
"""Description of these runs, for captions."""


class Run(NamedTuple):
    """One run in virtual time.

    Attributes:
        model: Name of the trace, from `MODELS`.
        fabric: Name of the network, from `FABRICS`.
        gpus: Number of GPUs.
        cap_mb: Bucket cap in MiB.
        sync_every: Iterations from one synchronisation to the next.
        overlaps: False: all gradients become ready at the end of the backward pass.
    """

    model: str
    fabric: str
    gpus: int
    cap_mb: float = 25.0
    sync_every: int = 1
    overlaps: bool = True

    def emulate(self) -> Prediction:
        """Run the real reducer."""
        return self._by(emulate)

    def predict(self) -> Prediction:
        """Predict the run, with the interval that the uncertainty of the fabric gives."""
        return self._by(predict)

    def _by(self, method: Callable[..., Prediction]) -> Prediction:
        trace, fabric = MODELS[self.model](), FABRICS[self.fabric]()
        settings: dict[str, Any] = {"sync_every": self.sync_every, "assume": False}
        if self.overlaps:
            return method(trace, fabric, world_size=self.gpus, bucket_cap_mb=self.cap_mb, **settings)
        buckets = predict(trace, fabric, world_size=self.gpus, bucket_cap_mb=self.cap_mb).buckets
        return method(ready_at_the_end(trace), fabric, world_size=self.gpus, plan=buckets, **settings)

    @property
    def iteration_ms(self) -> float:
        """Milliseconds that the real reducer took for an iteration, from the committed table."""
        return committed_ns()[self] / 1e6


def ready_at_the_end(trace: Trace) -> Trace:
    """A copy of the trace in which all gradients become ready at the end of the backward pass.

    All collectives then start after the backward pass, and as many run at a time as the fabric allows.
    `Prediction.no_overlap_ns` is not used here, because its collectives run one at a time on every fabric.
    """

    def delayed(iteration: Iteration) -> Iteration:
        ready_ns = tuple(iteration.backward_end_ns for _ in iteration.ready_ns)
        return iteration.model_copy(update={"ready_ns": ready_ns})

    ranks = [rank.model_copy(update={"iterations": tuple(map(delayed, rank.iterations))}) for rank in trace.ranks]
    return trace.model_copy(update={"ranks": tuple(ranks)})


@cache
def committed_ns() -> dict[Run, int]:
    """Nanoseconds of each run's iteration."""
    with PATH.open(newline="") as file:
        return {
            Run(
                row["model"],
                row["fabric"],
                int(row["gpus"]),
                float(row["cap_mb"]),
                int(row["sync_every"]),
                row["overlaps"] == "yes",
            ): int(row["iteration_ns"])
            for row in csv.DictReader(file)
        }


def cells(run: Run) -> list[object]:
    """A run as cells of the table, in the order of its fields."""
    return [*run[:-1], "yes" if run.overlaps else "no"]


@cache
def clock_run(ranks: str) -> CommittedRun:
    """The committed run on this many ranks, a key of `CLOCK_RUNS`."""
    (found,) = [run for run in committed_runs() if run.name == CLOCK_RUNS[ranks]]
    return found


def clock_rows(ranks: str) -> dict[float, ValidationRow]:
    """Rows in ready order of the committed run on this many ranks, by bucket cap in MiB; one bucket: infinite."""
    return {float(row.cap_mb): row for row in clock_run(ranks).current.rows if row.order == "ready"}
