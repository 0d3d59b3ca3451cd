"""Autotuning: the first iterations are recorded, rank 0 chooses new buckets, and all ranks rebuild once more.

1. The reducer rebuilds its buckets in ready order, as always, and trains one more iteration: the first one after a
   rebuild checks every gradient and touches new memory.
2. The next iterations are recorded on all ranks; see `recorder`.
3. Rank 0 calls the *tuner* with the trace of all ranks and broadcasts the answer.
4. All ranks rebuild their buckets, or keep them. Nothing of this module runs in later iterations.

The ranks do so together, before a forward pass, where the reducer rebuilds its buckets; a rank that has run out of
inputs under Join does so too. Training goes on if the tuner raises an error or returns no valid buckets.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from torch import nn

from .bucketing import check_partition
from .checks.construction import check_buckets, exchange_device
from .data_parallel import DistributedDataParallel
from .logging_data import Data
from .parameters import sparse_parameters
from .recorder import record
from .trace import BucketLayout, Trace

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TunedBuckets:
    """Buckets that a tuner has chosen, and what it expects of them.

    Attributes:
        buckets: Parameter indices by bucket, in launch order; all of one dtype and device in each bucket, and
            parameters with sparse gradients alone.
        iteration_ns: Expected time of an iteration with these buckets.
        default_ns: Expected time of an iteration with the buckets that are in force.
    """

    buckets: Sequence[Sequence[int]]
    iteration_ns: int
    default_ns: int


Tuner = Callable[[Trace, DistributedDataParallel], TunedBuckets | None]
"""Chooses buckets from a recording of all ranks and the module that was recorded; None: those in force stay.

Called on rank 0 only, so it must not communicate. The other ranks wait, at most for the time-out of their group."""


Answer = TunedBuckets | str | None
"""A tuner's answer; a string is the message of an error."""


@dataclass(frozen=True)
class Autotune:
    """Tunes the buckets of a `DistributedDataParallel` once; its argument `autotune`.

    Rank 0 logs one line to the logger `reference.autotuning`: at level INFO what has changed and what the tuner
    expects, or at level WARNING why the tuner failed. The logging data of every rank has `autotuned` (0 or 1),
    `autotune_iteration_time` and `autotune_default_iteration_time` (nanoseconds, if there is an answer), and
    `autotune_error` (if the tuner failed).

    Attributes:
        tuner: See `Tuner`.
        iterations: Synchronised iterations to record, at least one.

    Raises:
        ValueError: There are no iterations to record.
    """

    tuner: Tuner
    iterations: int = 10

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ValueError(f"autotune: expected at least one iteration to record, got {self.iterations}")

    def check(self, ddp: DistributedDataParallel) -> None:
        """Raise a ValueError if the buckets of a module with these arguments cannot be tuned."""
        if ddp.plan is not None:
            raise ValueError("autotune: expected no plan, whose buckets are never rebuilt; leave out one of the two")
        if ddp.features.graph_may_change:
            raise ValueError(
                "autotune: expected find_unused_parameters=False or static_graph=True, because the buckets are "
                "never rebuilt if each iteration may use other parameters"
            )
        if ddp.delayed_parameters:
            raise ValueError(
                "autotune: expected every parameter in a bucket, got delay_all_reduce_named_params, whose all-reduce "
                "cannot be recorded; leave out one of the two"
            )
        record(ddp)  # raises if the recorder cannot time work on the module's devices

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Tune the buckets of the module's reducer, which has just been constructed."""
        ddp.reducer.rebuild = _TuningOnce(self, ddp).rebuild_if_due


class _TuningOnce:
    """Stands in for a reducer's `rebuild` until the buckets are tuned.

    Holds the module weakly, and so does the recording: a process group must not be in a reference cycle.
    """

    def __init__(self, tuning: Autotune, ddp: DistributedDataParallel) -> None:
        self._tuning = tuning
        self._ddp = cast("DistributedDataParallel", weakref.proxy(ddp))
        self._recording = record(cast("nn.Module", self._ddp))  # of the parameters as they are now
        self._due_at: int | None = None  # number of reductions after which to tune; None: the recording has not begun

    def rebuild_if_due(self, ready_order: Sequence[int], group: dist.ProcessGroup) -> bool:
        """Rebuild as the reducer does by itself; then start to record or tune, if one of these is due."""
        reducer = self._ddp.reducer
        rebuilt = reducer.buckets.rebuild_if_due(ready_order, group)
        if not ready_order:
            return rebuilt
        if self._due_at is None:
            # The forward pass of this iteration has begun, so torch will call new hooks only if there are old ones.
            self._due_at = reducer.reductions + 1 + self._tuning.iterations
            self._recording.__enter__()
            weakref.finalize(self, self._recording.stop)  # if the training ends before the recording
        elif reducer.reductions >= self._due_at:
            reducer.rebuild = reducer.buckets.rebuild_if_due
            return self._tune(group)
        return rebuilt

    def _tune(self, group: dist.ProcessGroup) -> bool:
        ddp = self._ddp
        answer: Answer = None
        try:
            self._recording.__exit__(None, None, None)
            if dist.get_rank(group) == 0:
                answer = self._checked(self._tuning.tuner(self._recording.trace, ddp))
        except Exception as error:  # noqa: BLE001 - a tuner may raise anything, and training must go on
            answer = f"{type(error).__name__}: {error}"
        answers = [answer]
        dist.broadcast_object_list(answers, group_src=0, group=group, device=exchange_device(ddp.module, group))
        answer, present = answers[0], ddp.reducer.buckets.assignment
        ddp.log.autotune = _logging_data(answer, present)
        if dist.get_rank(group) == 0:
            _report(answer, present)
        if not isinstance(answer, TunedBuckets) or answer.buckets == present:
            return False
        ddp.reducer.buckets.rebuild(answer.buckets)
        return True

    def _checked(self, answer: TunedBuckets | None) -> TunedBuckets | None:
        """The answer in Python's own types.

        Raises:
            TypeError: The tuner has returned something else.
            ValueError: Its buckets are not valid.
        """
        if answer is None:
            return None
        if not isinstance(answer, TunedBuckets):
            raise TypeError(f"expected TunedBuckets or None from the tuner, got {type(answer).__name__}")
        buckets = tuple(tuple(map(int, bucket)) for bucket in answer.buckets)
        parameters = self._ddp.bucketed_parameters()
        check_partition(buckets, len(parameters), name="the tuner's buckets")
        check_buckets(buckets, parameters, sparse_parameters(self._ddp.module), name="the tuner's buckets")
        return TunedBuckets(buckets, int(answer.iteration_ns), int(answer.default_ns))


def _report(answer: Answer, present: BucketLayout) -> None:
    """Log one line: what happens to the buckets in force, `present`, and why."""
    if isinstance(answer, str):
        _log.warning("autotune: the %d buckets stay, because tuning failed: %s", len(present), answer)
    elif answer is None or answer.buckets == present:
        _log.info("autotune: the %d buckets stay, because the tuner has found none that are faster", len(present))
    else:
        expected_ms = answer.iteration_ns / 1e6, answer.default_ns / 1e6
        counts = len(answer.buckets), len(present)
        _log.info("autotune: %d buckets instead of %d; expect %.3f ms instead of %.3f ms", *counts, *expected_ms)


def _logging_data(answer: Answer, present: BucketLayout) -> Data:
    if answer is None:
        return {"autotuned": 0}
    if isinstance(answer, str):
        return {"autotuned": 0, "autotune_error": answer}
    return {
        "autotuned": int(answer.buckets != present),
        "autotune_iteration_time": answer.iteration_ns,
        "autotune_default_iteration_time": answer.default_ns,
    }
