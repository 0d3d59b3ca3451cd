"""Buckets on their way: by an all-reduce, or as a comm hook says."""

from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .bucket import Bucket
from .diagnosis import Diagnosis
from .hooks.grad_bucket import GradBucket, Hook, result_of
from .observer import Future, Observer, fail
from .order import LaunchOrder


class Communication:
    """Sends buckets over `group` and remembers those in flight.

    Args:
        group: The ranks.
        diagnosis: Makes messages.
        observers: Who is told of errors; the list may grow.

    Attributes:
        order: Told of every launch, and asked when one fails.
        sent: Buckets sent since `begin`.
    """

    def __init__(self, group: dist.ProcessGroup, diagnosis: Diagnosis, observers: list[Observer]) -> None:
        self._group = group
        self._diagnosis = diagnosis
        self._observers = observers
        self._hook: tuple[Hook, Any] | None = None
        self.order = LaunchOrder()
        self.begin()

    def begin(self) -> None:
        """A new iteration."""
        self._in_flight: dict[int, tuple[Future, int]] = {}

    @property
    def sent(self) -> int:
        """Buckets sent since `begin`."""
        return len(self._in_flight)

    @property
    def hooked(self) -> bool:
        """Whether a comm hook does the work, and so the averaging."""
        return self._hook is not None

    def register(self, state: Any, hook: Hook) -> None:
        """Have a hook send all buckets from now on.

        Raises:
            RuntimeError: There is one already.
        """
        if self._hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._hook = hook, state

    def send(self, bucket: Bucket, number: int, *, is_last: bool) -> Future:
        """Start; returns at once."""
        self.order.launching(number, bucket.size_bytes)
        if self._hook is None:
            future = bucket.all_reduce(self._group)
        else:
            hook, state = self._hook
            future = hook(state, GradBucket(bucket, number, is_last=is_last))
            if not isinstance(future, torch._C.Future):
                fail(self._observers, self._diagnosis.no_future(hook, number, future))
        self._in_flight[number] = future, self.order.launches
        return future

    def was_sent(self, number: int) -> bool:
        """Whether a bucket was sent since `begin`."""
        return number in self._in_flight

    def wait(self, number: int) -> None:
        """Block until a bucket has arrived (on CUDA: make the current stream wait).

        Raises:
            RuntimeError: It did not; with what is known of the ranks that left the order of launches.
        """
        future, launch = self._in_flight[number]
        try:
            future.wait()
        except RuntimeError as error:
            self._let_all_end()
            if explanation := self.order.explain(launch):
                fail(self._observers, f"{explanation}. {error}")
            raise

    def _let_all_end(self) -> None:
        """Those in flight work on buffers that the next iteration uses."""
        for future, _ in self._in_flight.values():
            with suppress(Exception):
                future.wait()

    def averages(self, bucket: Bucket, number: int) -> Tensor | None:
        """What arrived, flat; None: it is in the bucket's own buffer."""
        return result_of(self._in_flight[number][0], bucket) if self._hook else None
