"""Stream: all-reduces that go on by themselves while the thread that began them does something else."""

import threading
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .samples import clock_ns


class Stream:
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
