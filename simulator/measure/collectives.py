"""Measures collectives by size: one all-reduce, two at a time, a broadcast."""

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from reference import models
from reference.launch import report_progress
from reference.parameters import size_bytes, trainable_parameters

from .timing import clock_ns, time_ns

BUDGET_NS = 1_500_000_000
"""Time for the repetitions of one measurement, unless there would be too few."""
LEAST_REPEATS = 3
QUEUED = 4
"""Messages that wait for their turn when two are to run at a time: then no thread decides when the next begins."""

Samples = dict[str, dict[int, list[int]]]
"""Nanoseconds by what was done and by size."""


def time_collectives(rank: int, _world_size: int, sizes: list[int], repeats: int) -> Samples:
    """Times of an all-reduce, of two at a time (of a queue of them), of a broadcast; the first of each is left out.

    Repetitions are interleaved, so that a drift of the machine's speed hits every size alike. Sizes that take long,
    as on a slow link, are repeated less often: until `BUDGET_NS` is spent on one, but `LEAST_REPEATS` times.
    """
    memory = Messages(2 * max(sizes))
    ways: dict[str, Callable[[list[Tensor]], int]] = {
        "all_reduce": lambda messages: time_ns(dist.all_reduce, messages[0]),
        "two": _two_at_a_time_ns,
        "broadcast": lambda messages: broadcast_ns(messages[0]),
    }
    times: Samples = {way: {size: [] for size in sizes} for way in ways}
    due = dict.fromkeys(sizes, repeats)
    for done in range(repeats + 1):
        if rank == 0:
            report_progress("calibrating collectives", done, repeats + 1)
        for size in (size for size in sizes if done <= due[size]):
            messages = memory.of(size, QUEUED)
            for way, take in ways.items():
                dist.barrier()
                times[way][size].append(take(messages))
            if done == 0:
                due[size] = affordable(sum(times[way][size][0] for way in ways), repeats)
    return {way: {size: taken[1:] for size, taken in by_size.items()} for way, by_size in times.items()}


def broadcast_ns(message: Tensor) -> int:
    """Nanoseconds from the last rank's call of a broadcast from rank 0 to the last rank's end; the same on all ranks.

    The root's own time would be too short: the root is done once it has sent the message, before the others have
    received it. The ranks share one machine and so one clock.
    """
    start = clock_ns()
    dist.broadcast(message, 0)
    last = torch.tensor([start, clock_ns()])
    dist.all_reduce(last, op=dist.ReduceOp.MAX)
    last_start, last_end = last.tolist()
    return int(last_end - last_start)


def _two_at_a_time_ns(messages: list[Tensor]) -> int:
    stream = AllReduceQueue(messages, at_a_time=None)
    stream.wait()
    return 2 * stream.pace_ns()


def affordable(once_ns: int, repeats: int, budget_ns: int = BUDGET_NS) -> int:
    """How often to repeat what took this rank so long; the ranks agree on the fewest."""
    affordable = torch.tensor(min(repeats, max(LEAST_REPEATS, budget_ns // once_ns)))
    dist.all_reduce(affordable, op=dist.ReduceOp.MIN)
    return int(affordable)


def gradient_bytes(_rank: int, _world_size: int, model: str) -> int:
    """Of all gradients of a model, as for `--model`."""
    return sum(map(size_bytes, trainable_parameters(models.build(model)[0]).values()))


class AllReduceQueue:
    """One all-reduce after the other, from now on; all ranks begin the same.

    Nothing of it needs a thread that waits, which would compete with computation for a core, and often would not run
    when it is time to issue the next one.

    Args:
        messages: What to add up, in this order.
        at_a_time: 1: each is issued when the one before it is done. None: all are issued at once, as by a reducer
            that is ahead of its network, and the backend runs as many at a time as it can.
    """

    def __init__(self, messages: Sequence[Tensor], at_a_time: int | None) -> None:
        first = at_a_time or len(messages)
        self._due = deque(messages[first:])
        self._count = len(messages)
        self._ends_ns: list[int] = []
        self._over = threading.Event()
        self._error: RuntimeError | None = None
        self._begun_ns = clock_ns()
        for message in messages[:first]:
            self._issue(message)

    def wait(self) -> None:
        """Block until all are done.

        Raises:
            RuntimeError: One of them failed.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error

    def pace_ns(self, until_ns: float = float("inf")) -> int:
        """Nanoseconds from the end of one to that of the next, on average up to that moment or to the first end."""
        ends_ns = sorted(self._ends_ns)
        counted = [end for end in ends_ns if end <= until_ns] or ends_ns[:1]
        return (counted[-1] - self._begun_ns) // len(counted)

    def _issue(self, message: Tensor) -> None:
        work = dist.all_reduce(message, async_op=True)
        assert work is not None
        work.get_future().add_done_callback(self._done)

    def _done(self, future: "torch.futures.Future[object]") -> None:
        """Runs in the backend's threads, in several at a time."""
        try:
            future.value()
            if self._due:
                self._issue(self._due.popleft())
        except RuntimeError as error:
            self._error = error
        self._ends_ns.append(clock_ns())
        if self._error is not None or len(self._ends_ns) == self._count:
            self._over.set()


class Messages:
    """Messages of one size after the other in memory as large as all gradients, as buckets are.

    Args:
        total_bytes: Of the memory.
    """

    def __init__(self, total_bytes: int) -> None:
        self._memory = torch.ones(total_bytes // 4)

    def of(self, size_bytes: int, count: int) -> list[Tensor]:
        """`count` of them, from the start again where the memory ends."""
        elements = size_bytes // 4
        places = max(1, len(self._memory) // elements)
        return [self._memory[elements * (n % places) :][:elements] for n in range(count)]
