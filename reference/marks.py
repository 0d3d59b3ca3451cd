"""Marks: one rank's raw clock readings while it is recorded, and how they become a `RankTrace`."""

import time
from dataclasses import dataclass, field

from .trace import BucketTimes, Iteration, Layout, RankTrace

now_ns = time.perf_counter_ns


@dataclass(slots=True)
class BucketMarks:
    """Readings of one bucket; `waited` is when the reducer came back from waiting for it."""

    ready: int
    launched: int
    done: int | None = None
    waited: int | None = None
    copied_out: int | None = None


@dataclass(slots=True)
class IterationMarks:
    """Readings of one iteration; None: has not happened. `in_backward`: autograd is at work."""

    forward_start: int
    ready: list[int | None]
    in_backward: bool = False
    synchronized: bool = False
    layout: Layout | None = None
    forward_end: int | None = None
    backward_start: int | None = None
    backward_end: int | None = None
    optimizer_start: int | None = None
    optimizer_end: int | None = None
    end: int | None = None
    buckets: list[BucketMarks] = field(default_factory=list)


class Marks:
    """All iterations of one rank. Every method is called from a hook and only notes the time.

    An iteration begins with the first forward pass after a backward pass and ends where the next begins.
    """

    def __init__(self, parameter_count: int) -> None:
        self._parameter_count = parameter_count
        self.zero = now_ns()
        self.iterations: list[IterationMarks] = []
        self.current = self._blank(self.zero)

    def _blank(self, now: int) -> IterationMarks:
        return IterationMarks(now, [None] * self._parameter_count)

    def forward_started(self) -> None:
        """A forward pass begins."""
        now = now_ns()
        if self.current.backward_end is not None:
            self.finish_iteration(now)
        if self.current.forward_end is None or self.current.in_backward:  # the latter: autograd raised an error
            self.current = self._blank(now)

    def forward_ended(self, *, synchronized: bool, layout: Layout | None) -> None:
        """A forward pass is over; whether its gradients will be averaged, and in which buckets."""
        self.current.forward_end = now_ns()
        self.current.synchronized = synchronized
        self.current.layout = layout if synchronized else None

    def backward_started(self) -> None:
        """Autograd begins; an iteration may have several backward passes, and lasts to the end of the last."""
        self.current.in_backward = True
        if self.current.backward_start is None:
            self.current.backward_start = now_ns()

    def backward_ended(self) -> None:
        """Autograd has run its last callback."""
        self.current.in_backward = False
        self.current.backward_end = now_ns()

    def finish_iteration(self, now: int | None = None) -> None:
        """Keep the current iteration if it is complete; `now` is where the next begins, None: there is none."""
        current = self.current
        if current.forward_end is not None and current.backward_end is not None:
            current.end = now or current.optimizer_end or current.backward_end
            self.iterations.append(current)
        self.current = self._blank(now_ns() if now is None else now)


def rank_trace(
    rank: int, offset_ns: int, uncertainty_ns: int, marks: Marks, *, zero: int, layouts: dict[Layout, int]
) -> RankTrace:
    """The finished record of one rank.

    Args:
        rank: Its number.
        offset_ns: What takes its clock to rank 0's.
        uncertainty_ns: How far that may be off.
        marks: What it noted.
        zero: Rank 0's reading at the start of its recording.
        layouts: Numbers of the layouts seen so far; each new one is added.

    Raises:
        RuntimeError: No iteration was complete.
    """
    if not marks.iterations:
        raise RuntimeError(
            "nothing was recorded: expected at least one forward pass of the recorded module and its backward "
            "pass inside the `with record(...)` block, with gradients enabled"
        )
    iterations = tuple(_iteration(iteration, marks.zero, layouts) for iteration in marks.iterations)
    return RankTrace(
        rank=rank,
        clock_offset_ns=offset_ns + marks.zero - zero,  # a rank's times count from its own zero
        clock_uncertainty_ns=uncertainty_ns,
        iterations=iterations,
    )


def _iteration(marks: IterationMarks, zero: int, layouts: dict[Layout, int]) -> Iteration:
    def since_zero(reading: int | None) -> int | None:
        return None if reading is None else reading - zero

    start, end = marks.backward_start, marks.backward_end
    assert start is not None
    assert end is not None
    assert marks.forward_end is not None
    assert marks.end is not None
    # Hooks of the output run in the order of the graph: a gradient may be ready a moment before ours fires.
    # A comm hook may send anything: without one all-reduce a bucket, nothing was seen of the buckets.
    layout = marks.layout if marks.layout is not None and len(marks.layout) == len(marks.buckets) else None
    start = min([start, *(ready for ready in marks.ready if ready is not None)])
    return Iteration(
        forward_start_ns=marks.forward_start - zero,
        forward_end_ns=min(marks.forward_end, start) - zero,
        backward_start_ns=start - zero,
        backward_end_ns=end - zero,
        optimizer_start_ns=since_zero(marks.optimizer_start),
        optimizer_end_ns=since_zero(marks.optimizer_end),
        end_ns=marks.end - zero,
        synchronized=marks.synchronized,
        layout=None if layout is None else layouts.setdefault(layout, len(layouts)),
        ready_ns=tuple(since_zero(ready) for ready in marks.ready),
        buckets=() if layout is None else tuple(_bucket(bucket, end, zero) for bucket in marks.buckets),
    )


def _bucket(marks: BucketMarks, backward_end: int, zero: int) -> BucketTimes:
    # The completion callback needs the interpreter and may get it after whoever waited had it first.
    seen = [moment for moment in (marks.done, marks.waited, backward_end) if moment is not None]
    return BucketTimes(
        ready_ns=marks.ready - zero,
        launched_ns=marks.launched - zero,
        done_ns=min(seen) - zero,
        copied_out_ns=None if marks.copied_out is None else marks.copied_out - zero,
    )
