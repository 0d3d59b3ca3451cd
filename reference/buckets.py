"""Buckets: flat buffers that collect gradients for one all-reduce, and the list of all buckets with its rebuild."""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from operator import attrgetter, is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .bucketing import assign_buckets, check_partition, should_rebuild
from .parameters import bucket_key, size_bytes

LARGE_ELEMENTS = 16 * 1024
"""On a CPU, a gradient of at least this many elements is copied and scaled by an operation of its own, in one pass
over memory. For smaller gradients the start of an operation costs more than the copy, so one fused operation copies
many of them. On a GPU, fused operations copy gradients of all sizes."""
MOST_WAITING_BYTES = 2**18
"""A bucket whose views become the gradients is packed as soon as gradients of more bytes in total wait in it, because
until then each of them takes memory beside its view."""
CACHE_LINE_BYTES = 64

_gradient_of = attrgetter("grad")


@dataclass(frozen=True, kw_only=True)
class Features:
    """Optional behaviour of a reducer; see the arguments of `DistributedDataParallel`."""

    find_unused_parameters: bool = False
    skip_all_reduce_unused_params: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    batched_grad_copy: bool = False

    @property
    def graph_may_change(self) -> bool:
        """Whether each iteration finds its own unused parameters; then one ready order does not predict the next."""
        return self.find_unused_parameters and not self.static_graph


class SecondGradientError(Exception):
    """A parameter got a second gradient in one backward pass.

    Attributes:
        index: Its parameter index.
    """

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class Bucket:
    """Gradients that one all-reduce averages.

    In each iteration a bucket goes through four steps: `put` for every parameter (after the last one the bucket is
    *ready*), `pack`, `all_reduce` or another collective over `buffer`, `copy_out`; `reset` starts the next iteration.
    The bucket owns its buffer. Parameters keep gradients of their own, which `pack` reads and `copy_out` overwrites.

    Gradients are copied together, in most cases when the bucket is ready, and not one by one as they arrive. Starting
    a copy between two layers of the backward pass costs more time than reading the gradient while it is in the CPU
    cache would save.

    Args:
        indices: Parameter index of each slot.
        parameters: The parameter of each slot; all of one dtype on one device.
        batched: Whether large gradients are copied by the fused operation too.

    Attributes:
        buffer: Flat tensor with all elements of the bucket; the all-reduce works on it in place.
        views: For each slot a view of `buffer` with the shape and memory format of the slot's parameter.
        is_put: For each slot whether its gradient has been put in this iteration.
        waiting: Slots that were put but not packed yet.
    """

    buffer: Tensor
    most_waiting_bytes: float = float("inf")
    """If gradients of more bytes in total wait, they are packed although the bucket is not ready."""

    def __init__(self, indices: Sequence[int], parameters: Sequence[nn.Parameter], *, batched: bool = False) -> None:
        self.indices = tuple(indices)
        self.parameters = list(parameters)
        self._sizes_bytes = [size_bytes(parameter) for parameter in self.parameters]
        self._largest_bytes = max(self._sizes_bytes)
        self.size_bytes = sum(self._sizes_bytes)
        self._make_buffer()
        all_fused = batched or self.parameters[0].device.type != "cpu"
        self._is_large = [not all_fused and parameter.numel() >= LARGE_ELEMENTS for parameter in self.parameters]
        self._all_small = not any(self._is_large)
        self.reset()

    def __repr__(self) -> str:
        return f"Bucket(parameters {list(self.indices)}, {self.size_bytes} bytes, {self._pending} pending)"

    def _make_buffer(self) -> None:
        first = self.parameters[0]
        elements = [parameter.numel() for parameter in self.parameters]
        lead = lead_in(elements, CACHE_LINE_BYTES // first.element_size()) if first.device.type == "cpu" else 0
        self.buffer = torch.empty(lead + sum(elements), dtype=first.dtype, device=first.device)[lead:]
        self.views = self.views_of(self.buffer)
        self._ends = list(accumulate(elements, initial=0))

    @property
    def ready(self) -> bool:
        """Whether every gradient has been put."""
        return self._pending == 0

    @property
    def puts_until_pack(self) -> int:
        """How many more gradients can be put before `put` may return True; at least 1."""
        return self._pending

    def reset(self) -> None:
        """Start an iteration: no gradient has been put."""
        self._pending = len(self.parameters)
        self.is_put = bytearray(self._pending)
        self.waiting: list[int] = []
        self._waiting_bytes = 0
        self._absent: list[int] = []

    def put(self, slots: Sequence[int]) -> bool:
        """Note that the gradients of these slots are ready; returns whether `pack` should be called now.

        Raises:
            SecondGradientError: One of them was put already.
        """
        is_put = self.is_put
        for slot in slots:
            if is_put[slot]:
                raise SecondGradientError(self.indices[slot])
            is_put[slot] = True
        self._pending -= len(slots)
        self.waiting += slots
        self._waiting_bytes += sum(map(self._sizes_bytes.__getitem__, slots))
        return not self._pending or self._waiting_bytes > self.most_waiting_bytes

    @torch.no_grad()
    def pack(self, scale: float) -> None:
        """Copy the gradients that were put since the last call into the buffer, multiplied by `scale`.

        A parameter without a gradient contributes zeros.
        """
        slots = sorted(self.waiting)  # the order of the buffer, which the cache prefers
        self.waiting = []
        self._waiting_bytes = 0
        if not self._all_small:
            for slot in filter(self._is_large.__getitem__, slots):
                self._pack_large(slot, scale)
            slots = [slot for slot in slots if not self._is_large[slot]]
        if slots:
            self._pack_small(slots, scale)

    def _pack_large(self, slot: int, scale: float) -> None:
        parameter, view = self.parameters[slot], self.views[slot]
        if parameter.grad is None:
            self._pack_absent(slot)
        else:
            torch.mul(parameter.grad, scale, out=view)
            self._packed([parameter], [view])

    def _pack_small(self, slots: list[int], scale: float) -> None:
        first, end = slots[0], slots[-1] + 1
        neighbours = end - first == len(slots)
        parameters = self.parameters[first:end] if neighbours else [self.parameters[slot] for slot in slots]
        views = self.views[first:end] if neighbours else [self.views[slot] for slot in slots]
        gradients = list(map(_gradient_of, parameters))
        if any(map(is_, gradients, repeat(None))) or any(map(is_, gradients, views)):
            for slot, gradient in zip(slots, gradients, strict=True):
                if gradient is None:
                    self._pack_absent(slot)
            to_copy = [
                one
                for one in zip(parameters, views, gradients, strict=True)
                if one[2] is not None and one[2] is not one[1]
            ]
            parameters, views, gradients = map(list, zip(*to_copy, strict=True)) if to_copy else ([], [], [])
        if gradients:
            torch._foreach_copy_(views, gradients)
            self._packed(parameters, views)
        if scale == 1.0:
            return
        if neighbours:  # one operation scales all of them
            self.buffer[self._ends[first] : self._ends[end]].mul_(scale)
        else:
            torch._foreach_mul_([self.views[slot] for slot in slots], scale)

    def _pack_absent(self, slot: int) -> None:
        self.views[slot].zero_()
        self._absent.append(slot)

    def _packed(self, parameters: Sequence[nn.Parameter], views: Sequence[Tensor]) -> None:
        """Called after the gradients of these parameters were copied into these views."""

    def unpack(self, scale: float) -> None:
        """Undo what `pack` did to the parameters' gradients, because the bucket will not be sent."""

    def all_reduce(self, group: dist.ProcessGroup) -> "torch.futures.Future[Any]":
        """Start to sum the buffer over the ranks of `group`, in place; returns at once."""
        return group.allreduce([self.buffer]).get_future()  # fewer Python calls than dist.all_reduce

    def copy_out(self, averages: Tensor | None = None, *, unused: frozenset[int] = frozenset()) -> None:
        """Overwrite the parameters' gradients with the averages.

        Args:
            averages: Flat tensor as long as `buffer`. None: the averages are in `buffer`.
            unused: Parameter indices whose gradient is left as it is, also where that is None.
        """
        parameters, views = self.parameters, self.views if averages is None else self.views_of(averages)
        if not unused.isdisjoint(self.indices):
            used = [slot for slot, index in enumerate(self.indices) if index not in unused]
            parameters, views = [parameters[slot] for slot in used], [views[slot] for slot in used]
        gradients = [parameter.grad for parameter in parameters]
        if any(map(is_, gradients, repeat(None))):  # another rank had a gradient
            for parameter, view in zip(parameters, views, strict=True):
                if parameter.grad is None:
                    parameter.grad = view.clone()
                else:
                    parameter.grad.copy_(view)
        elif gradients:
            torch._foreach_copy_(gradients, views)  # type: ignore[arg-type]  # none is None

    def zeros(self) -> "Bucket":
        """A copy of the bucket with a buffer of zeros: the contribution of a rank without gradients."""
        shadow = copy.copy(self)
        shadow.buffer = torch.zeros_like(self.buffer)
        shadow.views = self.views_of(shadow.buffer)
        return shadow

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Consecutive pieces of `flat`, each with its parameter's shape and memory format: copies are then fast."""
        flat = flat.contiguous()
        views = []
        offset = flat.storage_offset()
        for parameter in self.parameters:
            strides = torch.empty_like(parameter, device="meta").stride()  # dense, whatever the parameter's are
            views.append(flat.as_strided(parameter.size(), strides, offset))
            offset += parameter.numel()
        return views


class ViewBucket(Bucket):
    """A bucket whose views *are* the gradients once they have been packed: less memory, nothing to copy out.

    A gradient that autograd allocated anew, because the last one was set to None, is copied once and becomes a view.
    """

    most_waiting_bytes = MOST_WAITING_BYTES

    @property
    def puts_until_pack(self) -> int:
        """See `Bucket.puts_until_pack`."""
        room = max(0, MOST_WAITING_BYTES - self._waiting_bytes)
        return min(self._pending, 1 + room // max(1, self._largest_bytes))

    def _make_buffer(self) -> None:
        super()._make_buffer()
        for slot, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.views[slot].copy_(parameter.grad)
                self._packed([parameter], [self.views[slot]])

    def _packed(self, parameters: Sequence[nn.Parameter], views: Sequence[Tensor]) -> None:
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view

    @torch.no_grad()
    def unpack(self, scale: float) -> None:
        """Undo the scaling of the gradients that became views; see `Bucket.unpack`."""
        for slot, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if self.is_put[slot] and slot not in self.waiting and parameter.grad is view:
                view.div_(scale)

    def copy_out(self, averages: Tensor | None = None, *, unused: frozenset[int] = frozenset()) -> None:
        """Write averages that are elsewhere into the views; see `Bucket.copy_out`."""
        if averages is not None:
            self.buffer.copy_(averages)
        for slot in self._absent:
            if self.indices[slot] not in unused:
                self.parameters[slot].grad = self.views[slot]


class SparseBucket(Bucket):
    """The bucket of one parameter whose gradient is a sparse tensor; that tensor itself is the buffer.

    The gradient has one sparse dimension, as that of an embedding: Gloo requires the same number on all ranks.
    """

    def _make_buffer(self) -> None:
        (parameter,) = self.parameters
        rows = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty((0, *parameter.shape[1:]))
        empty = rows, values, parameter.shape
        self.buffer = torch.sparse_coo_tensor(*empty, is_coalesced=True, check_invariants=False)
        self.views = [self.buffer]

    def pack(self, scale: float) -> None:
        """Copy the gradient and scale the copy: its values may be the memory of a dense gradient too."""
        if not self.waiting:
            return
        self.waiting = []
        gradient = self.parameters[0].grad
        if gradient is None:
            self._make_buffer()
        else:
            self.buffer = gradient.detach() * scale
            self.views = [self.buffer]

    def zeros(self) -> "Bucket":
        """A copy of the bucket whose gradient has no rows; see `Bucket.zeros`."""
        shadow = copy.copy(self)
        shadow._make_buffer()
        return shadow

    def copy_out(self, averages: Tensor | None = None, *, unused: frozenset[int] = frozenset()) -> None:
        """Overwrite the parameter's gradient with the averages; see `Bucket.copy_out`."""
        (parameter,) = self.parameters
        averages = self.buffer if averages is None else averages
        if self.indices[0] in unused:
            return
        if parameter.grad is None:
            parameter.grad = averages
        elif parameter.grad is not averages:
            parameter.grad.copy_(averages)


class Buckets(Sequence[Bucket]):
    """All buckets of a reducer, in launch order.

    Args:
        parameters: Trainable parameters by parameter index.
        assignment: Parameter indices by bucket, in launch order.
        rebuild_caps_bytes: Caps for the rebuild in ready order. None: `assignment` stays.
        sparse: Parameter indices whose gradients are sparse tensors.
        features: See `Features`.

    Attributes:
        bucket_of: By parameter index the index of its bucket.
        slot_of: By parameter index its slot in that bucket.
        rebuilt: Whether the buckets have been rebuilt.
        features: As given.
        initial_sizes_bytes: Sizes of the buckets at construction.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        assignment: Sequence[Sequence[int]],
        *,
        rebuild_caps_bytes: Sequence[int] | None,
        sparse: frozenset[int],
        features: Features,
    ) -> None:
        self._parameters = parameters
        self._rebuild_caps = rebuild_caps_bytes
        self._sparse = sparse
        self.features = features
        self._initial = assignment
        self.reset()
        self.initial_sizes_bytes = [bucket.size_bytes for bucket in self]

    def __len__(self) -> int:
        return len(self._buckets)

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def __getitem__(self, index: Any) -> Any:
        return self._buckets[index]

    @property
    def assignment(self) -> tuple[tuple[int, ...], ...]:
        """Parameter indices by bucket, in launch order."""
        return tuple(bucket.indices for bucket in self)

    def reset(self) -> None:
        """Return to the buckets of construction, which will be rebuilt once."""
        self._buckets: list[Bucket] = []  # frees the old buffers before the new ones are allocated
        self.rebuilt = False
        self._allocate(self._initial)

    def _allocate(self, assignment: Sequence[Sequence[int]]) -> None:
        check_partition(assignment, len(self._parameters))
        self._buckets = [self._make_bucket(indices) for indices in assignment]
        self.bucket_of, self.slot_of = [0] * len(self._parameters), [0] * len(self._parameters)
        for number, bucket in enumerate(self._buckets):
            for slot, index in enumerate(bucket.indices):
                self.bucket_of[index], self.slot_of[index] = number, slot

    def _make_bucket(self, indices: Sequence[int]) -> Bucket:
        kind: type[Bucket] = ViewBucket if self.features.gradient_as_bucket_view else Bucket
        if self._sparse.intersection(indices):
            kind = SparseBucket
        return kind(indices, [self._parameters[i] for i in indices], batched=self.features.batched_grad_copy)

    def rebuild_if_due(self, ready_order: Sequence[int], group: dist.ProcessGroup) -> bool:
        """Rebuild once, in ready order, as soon as that order is known; returns whether this call rebuilt.

        Args:
            ready_order: Parameter indices in ready order; empty: not known yet.
            group: Ranks that must rebuild alike. Ready orders may differ between ranks; rank 0's is used.
        """
        if not should_rebuild(
            rebuilt=self.rebuilt,
            fixed=self._rebuild_caps is None or self.features.graph_may_change,
            has_ready_order=bool(ready_order),
        ):
            return False
        assert self._rebuild_caps is not None
        never_ready = sorted(set(range(len(self._parameters))) - set(ready_order))  # unused in a static graph
        order = torch.tensor([*ready_order, *never_ready], device=self._parameters[0].device)
        dist.broadcast(order, group_src=0, group=group)
        self._buckets = []  # frees the old buffers before the new ones are allocated
        self._allocate(
            assign_buckets(
                [size_bytes(parameter) for parameter in self._parameters],
                self._rebuild_caps,
                keys=[bucket_key(parameter) for parameter in self._parameters],
                sparse=[index in self._sparse for index in range(len(self._parameters))],
                order=order.tolist(),
            )
        )
        self.rebuilt = True
        return True


def lead_in(elements: Iterable[int], line: int) -> int:
    """Elements to leave free before a buffer so that most of its bytes lie in slots that begin at a cache line.

    If a buffer starts at a cache line, one slot of odd size, such as a classifier's 1000 biases, shifts all slots
    after it off the cache lines, and copying into those slots takes half as long again.

    Args:
        elements: Elements of each slot, in the order of the buffer.
        line: Elements per cache line.
    """
    aligned: Counter[int] = Counter({0: 0})  # elements of the slots that would begin at a line, by lead-in
    ends = list(accumulate(elements, initial=0))
    for begin, end in pairwise(ends):
        aligned[-begin % line] += end - begin
    return max(aligned, key=lambda lead: (aligned[lead], -lead))
