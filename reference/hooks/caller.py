"""Calls the comm hook that a user registered, and says whose fault it is when that fails."""

import functools
import inspect
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup

from ..bucket import Bucket
from .grad_bucket import GradBucket, Hook, only_tensor

GRACE_S = 5.0
"""What a hook's collectives get beyond the group's time-out to report their own."""


class HookCaller:
    """A hook with its state; its errors name function, file and line, bucket and rank.

    Args:
        hook: The hook.
        state: What it is given besides the bucket.
        group: Its time-out, and a little more, is the longest that is waited for a hook's future.
    """

    def __init__(self, hook: Hook, state: Any, group: ProcessGroup) -> None:
        self._hook = hook
        self._state = state
        self._group = group
        self._rank = dist.get_rank(group)

    def call(self, bucket: Bucket, number: int, *, is_last: bool) -> "torch.futures.Future[Any]":
        """Give it a bucket.

        Raises:
            RuntimeError: It raised, or returned something that is no future.
        """
        try:
            future = self._hook(self._state, GradBucket(bucket, number, is_last=is_last))
        except Exception as error:
            raise RuntimeError(f"{self._where(number)}: it raised {type(error).__name__}: {error}") from error
        if not isinstance(future, torch._C.Future):
            raise RuntimeError(
                f"{self._where(number)}: expected it to return a torch.futures.Future, got {type(future).__name__}. "
                "Return the future of its collective: dist.all_reduce(..., async_op=True).get_future()"
            )
        return future

    def wait(self, future: "torch.futures.Future[Any]", bucket: Bucket, number: int) -> Tensor | None:
        """Block until what it returned for the bucket is there (on CUDA: make the current stream wait).

        Returns:
            The flat tensor that it holds. None: that is the bucket's own buffer.

        Raises:
            RuntimeError: It holds an error, or nobody gave it a result in time.
            TypeError: It holds something else.
        """
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        if not done.wait(patience_s := self._patience_s(bucket)):
            raise RuntimeError(
                f"{self._where(number)}: its future had no result after {patience_s:g} s. Either "
                "nothing sets it, or another rank does not take part in its collectives"
            )
        try:
            future.wait()
        except Exception as error:
            raise RuntimeError(f"{self._where(number)}: its future holds {type(error).__name__}: {error}") from error
        return self._result(only_tensor(future), bucket, number)

    def _patience_s(self, bucket: Bucket) -> float | None:
        options = self._group._get_backend(bucket.buffer.device).options
        if options is None:  # a backend without time-outs
            return None
        timeout: timedelta = options._timeout
        return timeout.total_seconds() + min(timeout.total_seconds(), GRACE_S)

    def _result(self, value: Any, bucket: Bucket, number: int) -> Tensor | None:
        expected = bucket.buffer
        in_pairs = isinstance(value, Tensor) and not value.is_complex() and value.numel() == 2 * expected.numel()
        if expected.is_complex() and in_pairs:
            value = torch.view_as_complex(value.reshape(-1, 2))  # collectives see complex numbers as pairs
        if not isinstance(value, Tensor) or value.numel() != expected.numel():
            got = f"one of {value.numel()}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"{self._where(number)}: expected its future to hold a tensor of {expected.numel()} elements, "
                f"got {got}"
            )
        if value.is_sparse:
            return value
        return None if value.data_ptr() == expected.data_ptr() else value.reshape(-1)

    def _where(self, number: int) -> str:
        return f"rank {self._rank}, bucket {number}: comm hook {describe(self._hook)}"


def describe(hook: Hook) -> str:
    """Its name, and the file and line where it is defined, as far as can be told."""
    function: Any = hook
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__code__"):
        function = getattr(function, "__call__", function)  # noqa: B004 - an object that can be called
    function = inspect.unwrap(function)
    name = getattr(function, "__qualname__", repr(hook))
    code = getattr(function, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name
