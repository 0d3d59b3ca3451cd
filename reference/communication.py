"""Buckets on their way: by an all-reduce, or as a comm hook says."""

from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .bucket import Bucket
from .hooks.caller import HookCaller
from .hooks.grad_bucket import Hook
from .observer import Future, Observer, fail
from .order import LaunchOrder


class AllReduce:
    """What happens without a comm hook, with the methods of `HookCaller`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def call(self, bucket: Bucket, _number: int, *, is_last: bool) -> Future:
        """Start to add a bucket up over the ranks, in place."""
        return bucket.all_reduce(self._group)

    def wait(self, future: Future, _bucket: Bucket, _number: int) -> Tensor | None:
        """Block until it is done; the sums are in the bucket's own buffer."""
        future.wait()
        return None


class Communication:
    """Sends buckets over `group` and remembers those in flight.

    Args:
        group: The ranks.
        observers: Who is told of errors; the list may grow.

    Attributes:
        order: Told of every launch, and asked when one fails.
        sent: Buckets sent since `begin`.
    """

    def __init__(self, group: dist.ProcessGroup, observers: list[Observer]) -> None:
        self._group = group
        self._observers = observers
        self._way: AllReduce | HookCaller = AllReduce(group)
        self.order = LaunchOrder()
        self.begin()

    def begin(self) -> None:
        """A new iteration."""
        self._in_flight: dict[int, tuple[Future, Bucket, int]] = {}

    @property
    def sent(self) -> int:
        """Buckets sent since `begin`."""
        return len(self._in_flight)

    @property
    def hooked(self) -> bool:
        """Whether a comm hook does the work, and so the averaging."""
        return isinstance(self._way, HookCaller)

    def register(self, state: Any, hook: Hook) -> None:
        """Have a hook send all buckets from now on.

        Raises:
            RuntimeError: There is one already.
        """
        if self.hooked:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._way = HookCaller(hook, state, self._group)

    def send(self, bucket: Bucket, number: int, *, is_last: bool) -> Future:
        """Start; returns at once.

        Raises:
            RuntimeError: The comm hook failed.
        """
        self.order.launching(number, bucket.size_bytes)
        try:
            future = self._way.call(bucket, number, is_last=is_last)
        except RuntimeError as error:
            self._tell(error)
            raise
        self._in_flight[number] = future, bucket, self.order.launches
        return future

    def was_sent(self, number: int) -> bool:
        """Whether a bucket was sent since `begin`."""
        return number in self._in_flight

    def wait(self, number: int) -> Tensor | None:
        """Block until a bucket has arrived (on CUDA: make the current stream wait).

        Returns:
            The averages, flat. None: they are in the bucket's own buffer.

        Raises:
            RuntimeError: It did not; with what is known of the ranks that left the order of launches.
            TypeError: The comm hook's future holds something else.
        """
        future, bucket, launch = self._in_flight[number]
        try:
            return self._way.wait(future, bucket, number)
        except TypeError as error:
            self._tell(error)
            raise
        except RuntimeError as error:
            self._let_all_end()
            if explanation := self.order.explain(launch):
                fail(self._observers, f"{explanation}. {error}")
            self._tell(error)
            raise

    def _tell(self, error: Exception) -> None:
        for observer in self._observers:
            observer.failed(str(error))

    def _let_all_end(self) -> None:
        """Those in flight work on buffers that the next iteration uses; what a hook does may never end."""
        if not self.hooked:
            for future, _, _ in self._in_flight.values():
                with suppress(Exception):
                    future.wait()
