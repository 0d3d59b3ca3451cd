"""Buckets: flat buffers that collect gradients for one all-reduce, and the list of all buckets with its rebuild."""

import copy
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .bucket_memory import ScaledCopies, aligned_buffer, views_of
from .bucketing import rebuild_order, rebuilt_buckets
from .message_sizes import READY_ORDER_BYTES
from .parameters import INTEGERS, bucket_key, dense_strides

if TYPE_CHECKING:
    from .checks.construction import Setup

NEVER = 2**62
"""A number of gradients, or of their bytes, that is never reached."""
MOST_WAITING_BYTES = 2**18
"""Gradients of more bytes than this do not wait until their bucket is complete: they would leave a CPU's caches."""
SUM = dist.AllreduceOptions()
"""torch's options of an all-reduce, as they are by default: a process group written in Python must be given some."""


class SecondGradientError(Exception):
    """A parameter got a second gradient in one backward pass; the argument is its parameter index."""


class Bucket:
    """Gradients that one all-reduce averages.

    In each iteration a bucket goes through four steps: `put` for every parameter (after the last one the bucket is
    *ready*), `pack`, `all_reduce` or another collective over `buffer`, `copy_out`; `reset` starts the next iteration.
    The bucket owns its buffer. Parameters keep gradients of their own, which `pack` reads and `copy_out` overwrites.

    Small gradients are copied together, in most cases when the bucket is ready, and not one by one as they arrive.
    Starting a copy between two layers of the backward pass costs more time than reading a small gradient while it is
    in the CPU cache would save.

    Args:
        indices: Parameter index of each slot.
        parameters: The parameter of each slot; all of one dtype on one device.
        batched: Whether large gradients are copied by one operation too.

    Attributes:
        buffer: Flat tensor with all elements of the bucket; the all-reduce works on it in place.
        views: For each slot a view of `buffer` with the shape and memory format of the slot's parameter.
        is_put: For each slot whether its gradient has been put in this iteration.
        pending: Number of slots whose gradients have not been put.
        waiting: Slots that were put but not packed yet.
        room_bytes: How many more bytes of gradients can wait; beyond them `put` returns True.
    """

    buffer: Tensor

    def __init__(self, indices: Sequence[int], parameters: Sequence[nn.Parameter], *, batched: bool = False) -> None:
        self.indices = tuple(indices)
        self.parameters = list(parameters)
        self._sizes_bytes = [parameter.nbytes for parameter in self.parameters]
        self.size_bytes = sum(self._sizes_bytes)
        self._batched = batched
        self._make_buffer()
        self._copies = ScaledCopies(self.buffer, self.views, batched=batched)
        self.reset()

    @property
    def _most_waiting_bytes(self) -> int:
        return MOST_WAITING_BYTES if self.buffer.device.type == "cpu" and not self._batched else NEVER

    def __repr__(self) -> str:
        return f"Bucket(parameters {list(self.indices)}, {self.size_bytes} bytes, {self.pending} pending)"

    def _make_buffer(self) -> None:
        self.buffer, self.views = aligned_buffer(self.parameters)

    @property
    def ready(self) -> bool:
        """Whether every gradient has been put."""
        return self.pending == 0

    def reset(self) -> None:
        """Start an iteration: no gradient has been put."""
        self.pending = len(self.parameters)
        self.is_put = bytearray(self.pending)
        self.waiting: list[int] = []
        self.room_bytes = self._most_waiting_bytes
        self._absent: list[int] = []

    def put(self, slots: Sequence[int]) -> bool:
        """Note that slots are ready; returns whether to `pack` now. Raises SecondGradientError for one put before."""
        is_put = self.is_put
        for slot in slots:
            if is_put[slot]:
                raise SecondGradientError(self.indices[slot])
            is_put[slot] = True
        self.pending -= len(slots)
        self.waiting += slots
        self.room_bytes -= sum(map(self._sizes_bytes.__getitem__, slots))
        return not self.pending or self.room_bytes < 0

    def misfits(self, *, thorough: bool) -> list[int]:
        """Waiting slots without a gradient, and those whose gradients do not fit their views or are differentiable.

        Without `thorough`, all are compared by dtype and layout, the first also by device, and none by strides.
        """
        found = []
        for slot in self.waiting:
            gradient, view = self.parameters[slot].grad, self.views[slot]
            if gradient is None:
                found.append(slot)
                continue
            fits = gradient.dtype is view.dtype and gradient.layout is view.layout
            if fits and (thorough or slot == self.waiting[0]):
                fits = gradient.device == view.device and not gradient.requires_grad
            if fits and thorough and not view.is_sparse:
                fits = dense_strides(gradient) == dense_strides(view)
            if not fits:
                found.append(slot)
        return found

    def pack(self, scale: float) -> None:
        """Copy what was put since the last call into the buffer, times `scale`; zeros where there is no gradient."""
        slots = sorted(self.waiting)  # the order of the buffer, which the cache prefers
        self.waiting = []
        self.room_bytes = self._most_waiting_bytes
        gradients = [self.parameters[slot].grad for slot in slots]
        if any(map(is_, gradients, repeat(None))):
            absent = [slot for slot, gradient in zip(slots, gradients, strict=True) if gradient is None]
            self._absent += absent
            torch._foreach_zero_([self.views[slot] for slot in absent])
            slots = [slot for slot, gradient in zip(slots, gradients, strict=True) if gradient is not None]
            gradients = [self.parameters[slot].grad for slot in slots]
        self._copies.copy(slots, gradients, scale)  # type: ignore[arg-type]  # none is None

    def unpack(self, scale: float) -> None:
        """Undo what `pack` did to the parameters' gradients, because the bucket will not be sent."""

    def all_reduce(self, group: dist.ProcessGroup) -> "torch.futures.Future[Any]":
        """Start to sum the buffer over the ranks of `group`, in place; returns at once."""
        return group.allreduce([self.buffer], SUM).get_future()  # fewer Python calls than dist.all_reduce

    def copy_out(self, averages: Tensor | None = None, *, unused: frozenset[int] = frozenset()) -> None:
        """Overwrite the parameters' gradients with the averages, a flat tensor (None: `buffer`).

        The gradients of the parameter indices in `unused` are left as they are, also where they are None.
        """
        parameters, views = self.parameters, self.views if averages is None else self.views_of(averages)
        if not unused.isdisjoint(self.indices):
            used = [slot for slot, index in enumerate(self.indices) if index not in unused]
            parameters, views = [parameters[slot] for slot in used], [views[slot] for slot in used]
        gradients = [parameter.grad for parameter in parameters]
        if gradients and not any(map(is_, gradients, repeat(None))):
            with suppress(RuntimeError):  # there are conjugate or negative views
                torch._foreach_copy_(gradients, views)  # type: ignore[arg-type]  # none is None
                return
        for parameter, view in zip(parameters, views, strict=True):
            if parameter.grad is None:  # another rank had a gradient
                parameter.grad = view.to(parameter.dtype, copy=True)  # a comm hook's may be of a lower precision
            else:
                parameter.grad.copy_(view)

    def replaced(self, unused: frozenset[int]) -> int | None:
        """The index of a parameter whose gradient should be a view of the buffer and is not; None: there is none."""
        return None

    def zeros(self) -> "Bucket":
        """A copy of the bucket with a buffer of zeros: the contribution of a rank without gradients."""
        shadow = copy.copy(self)
        shadow.buffer = torch.zeros_like(self.buffer)
        shadow.views = self.views_of(shadow.buffer)
        return shadow

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Consecutive pieces of `flat` in the shapes and memory formats of `views`."""
        return views_of(flat, self.views)


class Buckets(list[Bucket]):
    """All buckets of a reducer, in launch order.

    Args:
        parameters: Trainable parameters by parameter index.
        setup: The buckets of construction, and what the rebuild needs.
        make_bucket: Makes a bucket of the kind that the options need; see `view_and_sparse_buckets`.

    Attributes:
        bucket_of: By parameter index the index of its bucket.
        slot_of: By parameter index its slot in that bucket.
        keys: By parameter index its dtype and device at construction; those of one bucket are equal.
        rebuilt: Whether the buckets have been rebuilt.
        initial_sizes_bytes: Sizes of the buckets at construction.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        setup: "Setup",
        make_bucket: Callable[[Sequence[int], Sequence[nn.Parameter]], Bucket],
    ) -> None:
        self._parameters, self._setup = parameters, setup
        self._make_bucket = make_bucket
        self.keys = [bucket_key(parameter) for parameter in parameters]
        self.sparse = setup.sparse
        self.reset()
        self.initial_sizes_bytes = [bucket.size_bytes for bucket in self]

    @property
    def assignment(self) -> tuple[tuple[int, ...], ...]:
        """Parameter indices by bucket, in launch order."""
        return tuple(bucket.indices for bucket in self)

    def reset(self) -> None:
        """Return to the buckets of construction, which will be rebuilt once."""
        self.rebuilt = False
        self._allocate(self._setup.buckets)

    def _allocate(self, assignment: Sequence[Sequence[int]]) -> None:
        self.clear()  # frees the old buffers before the new ones are allocated
        self += [self._make_bucket(indices, [self._parameters[index] for index in indices]) for indices in assignment]
        self.bucket_of, self.slot_of = [0] * len(self._parameters), [0] * len(self._parameters)
        for number, bucket in enumerate(self):
            for slot, index in enumerate(bucket.indices):
                self.bucket_of[index], self.slot_of[index] = number, slot

    def rebuild_if_due(self, ready_order: Sequence[int], group: dist.ProcessGroup) -> bool:
        """Rebuild in ready order if that order is known and there are caps for it; returns whether this call rebuilt.

        `ready_order` is empty until it is known. It may differ between the ranks of `group`, but all must send the
        same buckets, so rank 0's is used.
        """
        caps_bytes = self._setup.rebuild_caps_bytes
        if not ready_order or caps_bytes is None:
            return False
        own = rebuild_order(ready_order, len(self._parameters))
        order = torch.tensor(own, dtype=INTEGERS[READY_ORDER_BYTES], device=self._parameters[0].device)
        dist.broadcast(order, group_src=0, group=group)
        sizes_bytes, walk = [parameter.nbytes for parameter in self._parameters], order.tolist()
        small_last = os.environ.get("DDP_SET_LAST_BUCKET_CAP") == "1"
        assignment = rebuilt_buckets(
            sizes_bytes, caps_bytes, keys=self.keys, sparse=self.sparse, order=walk, small_last=small_last
        )
        self._allocate(assignment)
        self.rebuilt = True
        return True
