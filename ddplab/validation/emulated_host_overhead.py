"""The work of an emulated device's host: measured with one all-reduce after each backward pass, added to predictions.

On a GPU, the host prepares gradients and launches while the device computes. The host of an emulated device also
broadcasts buffers, resets gradients and wakes late from sleeps. Predictions do not include this work, because it
exists only in the emulation; so it is measured and added. All ranks share the machine, so they delay each other.
"""

import time
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from reference.broadcast import broadcast_coalesced
from reference.data_parallel import DistributedDataParallel
from reference.reducer_observer import Observer
from reference.trace import Iteration, Trace
from simulator.fabric import Fabric, Timing

from ..calibration.collective_times import affordable_repeats, last_to_last_ns
from ..calibration.repeated_timing import clock_ns, median_ns, meet, of_slowest_rank, time_ns
from ..emulation.emulated_device import WallClock
from .training_runs import Trainer, groups_of_one
from .validation_report import Configuration, predict_one


class IterationWithOneAllReduce(NamedTuple):
    """One iteration of the real reducer with one bucket, in whose place the ranks all-reduce another message.

    Attributes:
        number: Position in the run; the recorded iterations repeat.
        alone_ns: Time of the same all-reduce on these ranks without training: the median.
        iteration_ns: Time from the previous iteration's end to this one's; as below, the last rank counts.
        packing_ns: Time from the moment at which the last gradient is due until the bucket is packed.
    """

    number: int
    alone_ns: int
    iteration_ns: int
    packing_ns: int


def with_packing(fabric: Fabric, trace: Trace, measured: Sequence[IterationWithOneAllReduce]) -> Fabric:
    """Return the fabric with costs of packing as in training, where all ranks pack at the same moment.

    With fewer cores than ranks, ranks that pack at the same moment wait for a core.
    """
    pack = fabric.processor.pack
    factor = median_ns(one.packing_ns for one in measured) / sum(map(pack, trace.sizes_bytes))
    return fabric.with_processor(pack=pack.times(factor))


def host_ns_by_iteration(
    trace: Trace, fabric: Fabric, world_size: int, measured: Sequence[IterationWithOneAllReduce]
) -> list[int]:
    """Return by how many nanoseconds the host prolonged each iteration, apart from the costs in `fabric`.

    All-reduces in `fabric` do not count, so the host's work is that of these ranks also if `fabric` was extrapolated.
    """
    free = Timing(world_size=world_size, size_bytes=0, ns=0)
    only_broadcasts = fabric.model_copy(update={"all_reduce": (free,), "sharing": ()})
    predicted_ns = predict_one(trace, only_broadcasts, Configuration(float("inf")), world_size).samples_ns
    return [
        max(0, one.iteration_ns - one.alone_ns - predicted_ns[one.number % len(predicted_ns)]) for one in measured
    ]


def with_longer_steps(trace: Trace, by_ns: Sequence[int]) -> Trace:
    """Return a trace with each iteration once per entry of `by_ns`, by which it takes longer after its backward pass.

    Each iteration is followed by its own repetitions, so the first one still comes first and the last one last.
    """
    ranks = []
    for rank in trace.ranks:
        longer: list[Iteration] = []
        for one, added_ns in product(rank.iterations, by_ns):
            start_ns = longer[-1].end_ns if longer else one.forward_start_ns
            moved = one.shifted(start_ns - one.forward_start_ns)
            longer.append(moved.model_copy(update={"end_ns": moved.end_ns + added_ns}))
        ranks.append(rank.model_copy(update={"iterations": tuple(longer)}))
    return trace.model_copy(update={"ranks": tuple(ranks)})


# Rank body

WARM_UP = 2
"""Iterations before those that are timed: in the second one, the reducer rebuilds its buckets."""
FEWEST, MOST = 8, 24
"""Fewest and most iterations that are timed."""
BUDGET_NS = 3_000_000_000
"""Time budget for these iterations."""


class AllReduceAfterBackward(Observer):
    """All-reduces one message in each iteration, where a reducer with one bucket would wait for its all-reduce.

    Notes by `clock_ns` when the last gradient was due and when the bucket was packed. The clock of the emulated
    device must come later in the reducer's list of observers.
    """

    def __init__(self, size_bytes: int, device: WallClock) -> None:
        self.message = torch.ones(size_bytes // 4)
        self._device = device
        self.due_ns = self.packed_ns = 0

    def bucket_packing(self, bucket: int) -> None:
        """Note when the last gradient was due."""
        self.due_ns = self._device.due_ns

    def bucket_ready(self, bucket: int) -> None:
        """Note the end of packing."""
        self.packed_ns = clock_ns()

    def backward_computed(self) -> None:
        """All-reduce the message."""
        dist.all_reduce(self.message)


def time_one_all_reduce_each(
    rank: int, world_size: int, model: str, size_bytes: int, pause_s: float
) -> list[IterationWithOneAllReduce]:
    """Train the recorded iterations of an emulated model from the first on, with one bucket, in groups of one rank.

    After each backward pass, the ranks all-reduce a message of `size_bytes`; without training, they sleep for
    `pause_s` seconds before they all-reduce it.
    """
    alone = groups_of_one(world_size)[rank]
    everybody = dist.group.WORLD
    trainer = Trainer(model, rank)
    assert everybody is not None
    assert trainer.device is not None
    observer = AllReduceAfterBackward(size_bytes, trainer.device.observer)
    buffers = list(trainer.module.buffers())
    ddp = DistributedDataParallel(
        trainer.module, process_group=alone, bucket_cap_mb=float("inf"), forward_sync_buffers=False
    )
    ddp.reducer.observers += [observer, trainer.device.observer]
    warm_up_ns = [time_ns(trainer.step, ddp) for _ in range(WARM_UP)]
    trainer.device.next_iteration = 0
    alone_ns = median_ns(_time_alone(observer.message, pause_s) for _ in range(FEWEST))
    count = affordable_repeats(warm_up_ns[-1], MOST, BUDGET_NS, at_least=FEWEST)
    meet()
    moments_ns = [clock_ns()]
    for _ in range(count):
        broadcast_coalesced(buffers, everybody)
        trainer.step(ddp)
        moments_ns += [observer.due_ns, observer.packed_ns, clock_ns()]
    ddp.reducer.detach()
    start_ns, *rest_ns = of_slowest_rank(moments_ns)
    due_ns, packed_ns, end_ns = np.reshape(rest_ns, (-1, 3)).T
    iteration_ns, packing_ns = np.diff(end_ns, prepend=start_ns).tolist(), (packed_ns - due_ns).tolist()
    return [
        IterationWithOneAllReduce(number, alone_ns, *times_ns)
        for number, times_ns in enumerate(zip(iteration_ns, packing_ns, strict=True))
    ]


def _time_alone(message: torch.Tensor, pause_s: float) -> int:
    meet()
    time.sleep(pause_s)
    return last_to_last_ns(dist.all_reduce, message)
