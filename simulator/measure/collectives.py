"""Measures collectives by message size: an all-reduce alone, all-reduces two at a time, and a broadcast."""

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
"""Time for all repetitions of one measurement, unless fewer than `LEAST_REPEATS` would fit."""
LEAST_REPEATS = 3
QUEUE_LENGTH = 4
"""All-reduces in the queue that measures two at a time: enough that the backend starts the next one without delay."""

Samples = dict[str, dict[int, list[int]]]
"""Nanoseconds by measurement ("all_reduce", "two", "broadcast") and message size."""


def time_collectives(rank: int, _world_size: int, sizes: list[int], repeats: int) -> Samples:
    """Repeated times of an all-reduce, of all-reduces two at a time and of a broadcast, without the first of each.

    Repetitions of all sizes are interleaved, so that a drift of the machine's speed affects every size alike. A size
    that takes long, as on a slow link, is repeated until `BUDGET_NS` is spent, but at least `LEAST_REPEATS` times.

    Args:
        rank: This rank.
        sizes: Message sizes in bytes.
        repeats: Repetitions of each measurement of a size that takes little time.
    """
    buffer = MessageBuffer(2 * max(sizes))
    measurements: dict[str, Callable[[list[Tensor]], int]] = {
        "all_reduce": lambda messages: time_ns(dist.all_reduce, messages[0]),
        "two": two_at_a_time_ns,
        "broadcast": lambda messages: broadcast_ns(messages[0]),
    }
    times: Samples = {name: {size: [] for size in sizes} for name in measurements}
    repeats_of = dict.fromkeys(sizes, repeats)
    for done in range(repeats + 1):
        if rank == 0:
            report_progress("calibrating collectives", done, repeats + 1)
        for size in (size for size in sizes if done <= repeats_of[size]):
            messages = buffer.messages(size, QUEUE_LENGTH)
            for name, measure in measurements.items():
                dist.barrier()
                times[name][size].append(measure(messages))
            if done == 0:
                repeats_of[size] = affordable_repeats(sum(times[name][size][0] for name in measurements), repeats)
    return {name: {size: taken[1:] for size, taken in by_size.items()} for name, by_size in times.items()}


def two_at_a_time_ns(messages: list[Tensor]) -> int:
    """Nanoseconds of one all-reduce while two run at a time."""
    queue = AllReduceQueue(messages, all_at_once=True)
    queue.wait()
    return 2 * queue.ns_per_all_reduce()


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


def affordable_repeats(once_ns: int, repeats: int, budget_ns: int = BUDGET_NS) -> int:
    """Repetitions that fit into `budget_ns`, from `LEAST_REPEATS` to `repeats`; the least of all ranks, on each.

    Args:
        once_ns: Nanoseconds that one repetition takes on this rank.
        repeats: Repetitions if the budget does not matter.
        budget_ns: Nanoseconds for all repetitions.
    """
    affordable = torch.tensor(min(repeats, max(LEAST_REPEATS, budget_ns // once_ns)))
    dist.all_reduce(affordable, op=dist.ReduceOp.MIN)
    return int(affordable)


def gradient_bytes(_rank: int, _world_size: int, model: str) -> int:
    """Bytes of all gradients of a model, which is named as for `--model`."""
    return sum(map(size_bytes, trainable_parameters(models.build(model)[0]).values()))


class AllReduceQueue:
    """All-reduces that are issued one after the other, beginning now; all ranks create the same queue.

    An all-reduce is issued from the callback of the one before. A thread that waits would compete with computation
    for a core, and would often not be running when the next all-reduce is due.

    Args:
        messages: What to add up, in this order.
        all_at_once: False: each is issued when the one before it is done. True: all are issued now, as by a reducer
            that is ahead of its network, and the backend runs as many at a time as it can.
    """

    def __init__(self, messages: Sequence[Tensor], *, all_at_once: bool) -> None:
        issued_now = len(messages) if all_at_once else 1
        self._due = deque(messages[issued_now:])
        self._count = len(messages)
        self._ends_ns: list[int] = []
        self._over = threading.Event()
        self._error: RuntimeError | None = None
        self._start_ns = clock_ns()
        for message in messages[:issued_now]:
            self._issue(message)

    def wait(self) -> None:
        """Block until all are done.

        Raises:
            RuntimeError: One of them failed.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error

    def ns_per_all_reduce(self, until_ns: float = float("inf")) -> int:
        """Mean nanoseconds between the ends of successive all-reduces.

        Args:
            until_ns: Only all-reduces that end until this moment count, but always the first.
        """
        ends_ns = sorted(self._ends_ns)
        counted = [end for end in ends_ns if end <= until_ns] or ends_ns[:1]
        return (counted[-1] - self._start_ns) // len(counted)

    def _issue(self, message: Tensor) -> None:
        work = dist.all_reduce(message, async_op=True)
        assert work is not None
        work.get_future().add_done_callback(self._done)

    def _done(self, future: "torch.futures.Future[object]") -> None:
        """Runs in the backend's threads, several of which may run this at the same time."""
        try:
            future.value()
            if self._due:
                self._issue(self._due.popleft())
        except RuntimeError as error:
            self._error = error
        self._ends_ns.append(clock_ns())
        if self._error is not None or len(self._ends_ns) == self._count:
            self._over.set()


class MessageBuffer:
    """Memory as large as all gradients, from which messages are taken one after the other, as buckets are.

    Args:
        total_bytes: Size of the memory.
    """

    def __init__(self, total_bytes: int) -> None:
        self._memory = torch.ones(total_bytes // 4)

    def messages(self, size_bytes: int, count: int) -> list[Tensor]:
        """`count` float32 views of `size_bytes` each, side by side; at the end of the memory again from its start."""
        elements = size_bytes // 4
        places = max(1, len(self._memory) // elements)
        return [self._memory[elements * (n % places) :][:elements] for n in range(count)]
