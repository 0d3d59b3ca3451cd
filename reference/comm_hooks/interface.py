"""The comm hook interface: what a hook receives and returns, and errors that name a failing hook.

A callback of a future must not hold a process group, also not through a hook's state. A thread of Gloo frees the
callback, some time after it has set the result. If the callback then has the last reference to the thread's own
group, the group's destructor waits for the thread itself, and C++ ends the process ("Resource deadlock avoided").
Callbacks hold the world size, or the part of a state that they change.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket as TorchGradBucket
from torch._C._distributed_c10d import ProcessGroup

from ..buckets import Bucket

Hook = Callable[[Any, Any], "torch.futures.Future[Any]"]
"""A function of a state and a `GradBucket`; returns a future of a tensor as long as the bucket's buffer."""
GRACE_S = 5.0
"""Wait at most this much longer than the group's time-out, so that a collective can report its time-out first."""


class GradBucket:
    """A bucket as a comm hook receives it; its gradients are not divided by the world size yet.

    Has the methods of `torch.distributed.GradBucket`, so hooks written for torch run on it.
    """

    def __init__(self, bucket: Bucket, index: int, *, is_last: bool) -> None:
        self._bucket = bucket
        self._index = index
        self._is_last = is_last
        self._buffer = bucket.buffer

    def index(self) -> int:
        """The bucket index."""
        return self._index

    def buffer(self) -> Tensor:
        """All gradients, flat: the bucket's own memory, which the hook may overwrite."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the flat tensor that `buffer` returns by another of the same length."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Views of `buffer`, one for each parameter, in the parameter's shape."""
        if self._buffer is self._bucket.buffer:
            return list(self._bucket.views)
        return self._bucket.views_of(self._buffer)

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of `gradients`."""
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """Whether this is the last bucket of the iteration."""
        return self._is_last


def check_hook(hook: object) -> None:
    """Raise TypeError for what is not callable, and ValueError for what has not the signature of a comm hook."""
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable: expected hook(state, bucket), got {hook!r}")
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    if bucket is None:
        raise ValueError(f"Communication hook: expected a parameter called bucket, got {hook!r}{signature}")
    if bucket.annotation not in (inspect.Parameter.empty, TorchGradBucket, GradBucket, "dist.GradBucket"):
        raise ValueError(
            f"Communication hook: bucket annotation should be dist.GradBucket, got {bucket.annotation!r}"
        )
    if signature.return_annotation not in (inspect.Signature.empty, torch.futures.Future[Tensor]):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor], "
            f"got {signature.return_annotation!r}"
        )


def only_tensor(future: "torch.futures.Future[Any]") -> Any:
    """The value of a hook's future; a list of one tensor, as a plain collective's future holds, is unpacked."""
    value = future.value()
    if isinstance(value, list | tuple) and len(value) == 1:
        (value,) = value
    return value


def used_on_this_stream(*tensors: Tensor) -> None:
    """On CUDA: keep memory that was allocated on another stream until the current stream has finished using it.

    Callbacks of futures run on streams of their own. torch keeps the memory of the tensors in the future's value; a
    callback must keep that of all other tensors that it uses.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


@dataclass(eq=False)
class HookCaller:
    """Calls a comm hook and waits for its futures; errors name the hook, its file and line, bucket and rank.

    `group` is the process group of the module, and may be replaced between iterations; `wait` raises an error
    shortly after its time-out.
    """

    hook: Hook
    state: Any
    group: ProcessGroup
    name: str = ""  # in the logging data; empty: the hook's own

    def call(self, bucket: Bucket, number: int, *, is_last: bool) -> "torch.futures.Future[Any]":
        """Call the hook for a bucket; returns its future. Raises RuntimeError if the hook raises or returns none."""
        try:
            future = self.hook(self.state, GradBucket(bucket, number, is_last=is_last))
        except Exception as error:
            raise RuntimeError(f"{self._where(number)}: it raised {type(error).__name__}: {error}") from error
        if not isinstance(future, torch._C.Future):
            raise RuntimeError(
                f"{self._where(number)}: expected it to return a torch.futures.Future, got {type(future).__name__}. "
                "Return the future of its collective: dist.all_reduce(..., async_op=True).get_future()"
            )
        return future

    def wait(self, future: "torch.futures.Future[Any]", bucket: Bucket, number: int) -> Tensor | None:
        """Block until a hook's future has a result (on CUDA: make the current stream wait).

        Returns the flat tensor that the future holds. None: that is the bucket's own buffer. Raises RuntimeError if
        the future holds an error, or had no result in time; TypeError if it holds no tensor as long as the bucket.
        """
        timeout_s = self._timeout_s(bucket)
        if timeout_s is not None and not future.done():
            done = threading.Event()
            future.add_done_callback(lambda _: done.set())
            if not done.wait(timeout_s):
                raise RuntimeError(
                    f"{self._where(number)}: its future had no result after {timeout_s:g} s. Either the hook never "
                    "sets a result, or another rank does not take part in its collectives"
                )
        try:
            future.wait()
        except Exception as error:
            # A future that holds an exception, which holds this frame, which holds the future, would never be freed.
            error.__traceback__ = error.__context__ = None
            raise RuntimeError(f"{self._where(number)}: its future holds {type(error).__name__}: {error}") from error
        return self._result(only_tensor(future), bucket, number)

    def _timeout_s(self, bucket: Bucket) -> float | None:
        """How long to wait for a future, in seconds. None: without limit, because the backend has no time-out."""
        try:
            options = self.group._get_backend(bucket.buffer.device).options
        except (AttributeError, RuntimeError):  # many backends have no options, and a group in Python has no backend
            return None
        timeout: timedelta | None = getattr(options, "_timeout", None)
        return None if timeout is None else timeout.total_seconds() + min(timeout.total_seconds(), GRACE_S)

    def _result(self, value: Any, bucket: Bucket, number: int) -> Tensor | None:
        expected = bucket.buffer
        if expected.is_complex() and isinstance(value, Tensor) and value.numel() == 2 * expected.numel():
            value = torch.view_as_complex(value.reshape(-1, 2))  # collectives see complex numbers as pairs
        if not isinstance(value, Tensor) or value.numel() != expected.numel():
            got = f"one of {value.numel()}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"{self._where(number)}: expected its future to hold a tensor of {expected.numel()} elements, "
                f"got {got}"
            )
        if value.is_sparse:
            return value
        result: Tensor = value.resolve_conj().resolve_neg()
        if result.untyped_storage().data_ptr() != expected.untyped_storage().data_ptr():
            return result.reshape(-1)
        same = result.dtype == expected.dtype and result.data_ptr() == expected.data_ptr() and result.is_contiguous()
        return None if same else result.reshape(-1).clone()  # copying out may overwrite the bucket's memory

    def _where(self, number: int) -> str:
        return f"rank {self.group.rank()}, bucket {number}: comm hook {describe(self.hook)}"


def describe(hook: Hook) -> str:
    """The hook's name and, if it is written in Python, the file and line where it is defined."""
    function: Any = hook
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__code__"):
        function = getattr(function, "__call__", function)  # noqa: B004 - a callable object
    function = inspect.unwrap(function)
    name = getattr(function, "__qualname__", repr(hook))
    code = getattr(function, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name
