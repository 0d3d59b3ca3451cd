"""Watches target runs: when each rank began and ended the steps that a prediction consists of.

The readings of all ranks and iterations are kept as a table of samples, from which `explain` finds why a prediction
and its measurement differ.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd

from reference.data_parallel import DistributedDataParallel
from reference.device_clock import Reading
from reference.files.writing import write_atomically
from reference.reducer_observer import Future, Observer

from ..calibration.repeated_timing import in_ns, read_clock
from ..emulation.emulated_device import WallClock

MomentKind = Literal[
    "buffers_received", "forward_computed", "packing", "packed", "launching", "launched", "backward_computed",
    "done", "woken", "copied_out", "ended",
]  # fmt: skip
"""What happened on a rank, in the order of an iteration.

- *buffers_received*: the broadcasts of buffers are over, and the forward pass begins
- *forward_computed*: the forward pass is over; of an emulated device: the device's, not that of its host
- *packing*, *packed*: copying the gradients of a bucket into it begins, and has ended
- *launching*, *launched*: issuing the collective of a bucket begins, and has ended
- *backward_computed*: all gradients have been computed, and all buckets launched
- *done*: this rank's part of the collective is over; read on emulated devices only, see `Watch`
- *woken*: the reducer has returned from waiting for the collective
- *copied_out*: the averages are in the gradients
- *ended*: the iteration is over
"""


class StepMoment(NamedTuple):
    """A reading of the clock, in nanoseconds of `clock_ns`; `bucket` is None if it belongs to no bucket."""

    kind: MomentKind
    bucket: int | None
    ns: int


Iterations = tuple[tuple[StepMoment, ...], ...]
"""The readings of one rank in one turn, by iteration, from the end of the slowest rank's previous iteration."""


def _taking(kind: MomentKind) -> Any:
    """Return a method of `Observer` that takes a reading."""

    def method(self: "Watch", bucket: int | None = None) -> None:
        self.take(kind, bucket)

    return method


class Watch(Observer):
    """Reads the clock at each step of the reducer.

    Args:
        calls_back: Whether callbacks read when collectives are done. They run in threads of the backend, which
            have to wait for the interpreter: on two ranks that compute on two cores, an iteration with 29 buckets
            takes 2.5 % longer. The other readings have no measurable cost. Beside emulated devices, which sleep,
            callbacks have none either.
    """

    def __init__(self, *, calls_back: bool) -> None:
        self._calls_back = calls_back
        self._readings: list[tuple[MomentKind, int | None, Reading]] = []

    def take(self, kind: MomentKind, bucket: int | None = None) -> Reading:
        """Read the clock; return the reading."""
        now = read_clock()
        self.add(kind, bucket, now)
        return now

    def add(self, kind: MomentKind, bucket: int | None, reading: Reading) -> None:
        """Add a reading of another clock."""
        self._readings.append((kind, bucket, reading))

    @property
    def moments(self) -> list[StepMoment]:
        """The readings so far; waits until the GPU has reached them. Those of callbacks may be out of order."""
        kinds, buckets, readings = zip(*self._readings, strict=True)
        return list(map(StepMoment, kinds, buckets, in_ns(*readings)))

    bucket_packing = _taking("packing")
    bucket_ready = _taking("packed")
    bucket_launching = _taking("launching")
    backward_computed = _taking("backward_computed")
    bucket_done = _taking("woken")
    bucket_copied_out = _taking("copied_out")

    def bucket_launched(self, bucket: int, future: Future) -> None:
        """Also have the end of the collective read."""
        self.take("launched", bucket)
        if self._calls_back:
            future.add_done_callback(lambda _future: self._done(bucket))

    def _done(self, bucket: int) -> None:
        self.take("done", bucket)


@contextmanager
def watched(ddp: DistributedDataParallel, device: WallClock | None) -> Iterator[Watch]:
    """Watch a module within the block; `device` is the clock of an emulated device, None without one."""
    watch = Watch(calls_back=device is not None)

    def buffers_received(*_: object) -> None:  # a result would replace the module's inputs
        watch.take("buffers_received")

    def forward_computed(*_: object) -> None:  # and here its output
        if device is None:
            watch.take("forward_computed")
        else:
            watch.add("forward_computed", None, device.due_ns)

    hooks = [
        ddp.module.register_forward_pre_hook(buffers_received),
        ddp.module.register_forward_hook(forward_computed),
    ]
    ddp.reducer.observers.insert(0, watch)  # first: a device's clock starts and stops counting after the reading
    try:
        yield watch
    finally:
        ddp.reducer.observers.remove(watch)
        for hook in hooks:
            hook.remove()


def by_iteration(moments: Sequence[StepMoment], starts_ns: Sequence[int]) -> Iterations:
    """Split the readings of a rank into iterations, each ended by the moment "ended"; the start of each becomes 0.

    The callback of a collective may run after the end of its iteration; such a reading is left out.
    """
    iterations: list[tuple[StepMoment, ...]] = []
    current: list[StepMoment] = []
    for moment in moments:
        if moment.kind == "done" and ("launched", moment.bucket) not in {one[:2] for one in current}:
            continue
        current.append(moment)
        if moment.kind == "ended":
            start_ns = starts_ns[len(iterations)]
            iterations.append(tuple(one._replace(ns=one.ns - start_ns) for one in current))
            current = []
    return tuple(iterations)


def to_samples(iterations_by_rank: Sequence[Iterations], **columns: object) -> pd.DataFrame:
    """Return the readings of one turn as a table with the columns iteration, rank, moment, bucket and ns.

    `columns` are further columns with one value each, such as the configuration.
    """
    rows = [
        (*columns.values(), number, rank, *moment)
        for rank, iterations in enumerate(iterations_by_rank)
        for number, iteration in enumerate(iterations)
        for moment in iteration
    ]
    frame = pd.DataFrame(rows, columns=[*columns, "iteration", "rank", "moment", "bucket", "ns"])
    return frame.astype({"bucket": "Int64"})


SAMPLES_FILE = "samples.parquet"


def save_samples(samples: Sequence[pd.DataFrame], out: Path) -> None:
    """Write the tables of all turns as one file, `SAMPLES_FILE`."""
    write_atomically(out / SAMPLES_FILE, pd.concat(samples, ignore_index=True).to_parquet(index=False))


def from_samples(samples: pd.DataFrame) -> list[Iterations]:
    """Return the readings of one turn by rank; the inverse of `to_samples`."""
    return [
        tuple(
            tuple(
                StepMoment(kind, None if pd.isna(bucket) else int(bucket), int(ns))
                for kind, bucket, ns in zip(one["moment"], one["bucket"], one["ns"], strict=True)
            )
            for _, one in of_rank.groupby("iteration", sort=True)
        )
        for _, of_rank in samples.groupby("rank", sort=True)
    ]
