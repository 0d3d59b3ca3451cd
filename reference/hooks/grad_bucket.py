"""What a comm hook is given: a bucket's gradients, under torch's names."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket as TorchGradBucket

from ..bucket import Bucket

Hook = Callable[[Any, Any], "torch.futures.Future[Any]"]
"""A function of a state and a `GradBucket`; returns a future of a tensor as long as the bucket's buffer."""


class GradBucket:
    """One bucket on its way through a comm hook; gradients are not divided by the world size.

    Has the methods of `torch.distributed.GradBucket`, so hooks written for torch run on it.

    Args:
        bucket: The bucket itself.
        index: Its place in launch order.
        is_last: Whether it is the last one of the iteration.
    """

    def __init__(self, bucket: Bucket, index: int, *, is_last: bool) -> None:
        self._bucket = bucket
        self._index = index
        self._is_last = is_last
        self._buffer = bucket.buffer

    def index(self) -> int:
        """Its place in launch order."""
        return self._index

    def buffer(self) -> Tensor:
        """All gradients, flat; the bucket's own memory, which the hook may overwrite."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the flat tensor that `buffer` returns by another as long."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Views of `buffer`, one a parameter, with its shape."""
        if self._buffer is self._bucket.buffer:
            return list(self._bucket.views)
        return self._bucket.views_of(self._buffer)

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of `gradients`."""
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """Whether it is the last bucket of the iteration."""
        return self._is_last


def check_hook(hook: object) -> None:
    """Refuse what cannot be a comm hook.

    Raises:
        TypeError: Not callable.
        ValueError: A parameter that is not called `bucket`, or annotations that promise something else.
    """
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
    """What a hook's future holds; the one of a plain collective holds it in a list."""
    value = future.value()
    if isinstance(value, list | tuple) and len(value) == 1:
        (value,) = value
    return value
