"""Buckets: flat buffers that collect gradients for one all-reduce, the list of them in force, and its rebuild."""

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .bucketing import assign_buckets, check_partition, should_rebuild
from .parameters import bucket_key, size_bytes

# On a CPU a gradient of at least this many elements is copied and scaled in one pass over memory; smaller ones
# cost more to launch than to copy, and all together take one fused copy. On a GPU all do.
LARGE = 16 * 1024
# Gradients that views will replace are packed before more bytes than this wait: until then both take memory.
MOST_WAITING_BYTES = 2**18
CACHE_LINE_BYTES = 64


class Bucket:
    """Gradients that travel together in one all-reduce.

    An iteration takes it through four steps: `put` once per parameter (it is *ready* after the last), `pack`,
    `all_reduce` or another collective over `buffer`, `copy_out`; `reset` begins the next. The bucket owns
    its buffer; parameters keep gradients of their own, which `pack` reads and `copy_out` overwrites.

    Gradients are copied when all are there rather than one by one as they arrive: between two layers the
    caches have forgotten how to copy, and a copy costs more to begin there than the gradient being in the
    cache saves.

    Args:
        indices: Parameter index of each slot.
        parameters: The parameters themselves, slot by slot; all of one dtype on one device.
        batched: Whether large gradients too take the fused copy.

    Attributes:
        buffer: Flat tensor of the bucket's size; the all-reduce works in place on it.
        views: Slot by slot a view of `buffer` with its parameter's shape and memory format.
        waiting: Slots that have been put but not packed.
        pack_early: Whether `pack` should be called now, although the bucket is not ready.
    """

    buffer: Tensor
    pack_early: bool = False

    def __init__(self, indices: Sequence[int], parameters: Sequence[nn.Parameter], *, batched: bool = False) -> None:
        self.indices = tuple(indices)
        self.parameters = list(parameters)
        self._make_buffer()
        all_fused = batched or self.parameters[0].device.type != "cpu"
        self._fused = [all_fused or parameter.numel() < LARGE for parameter in self.parameters]
        self.reset()

    def __repr__(self) -> str:
        return f"Bucket(parameters {list(self.indices)}, {self.size_bytes} bytes, {self._pending} pending)"

    def _make_buffer(self) -> None:
        first = self.parameters[0]
        elements = [parameter.numel() for parameter in self.parameters]
        lead = lead_in(elements, CACHE_LINE_BYTES // first.element_size()) if first.device.type == "cpu" else 0
        self.buffer = torch.empty(lead + sum(elements), dtype=first.dtype, device=first.device)[lead:]
        self.views = self.views_of(self.buffer)

    @property
    def size_bytes(self) -> int:
        """Bytes that its all-reduce moves."""
        return sum(map(size_bytes, self.parameters))

    @property
    def ready(self) -> bool:
        """Whether every gradient has been put."""
        return self._pending == 0

    def is_pending(self, slot: int) -> bool:
        """Whether the slot's gradient has not been put yet."""
        return not self._is_put[slot]

    def reset(self) -> None:
        """Expect every gradient anew."""
        self._pending = len(self.parameters)
        self._is_put = bytearray(self._pending)
        self.waiting: list[int] = []
        self._absent: list[int] = []

    def put(self, slot: int) -> bool:
        """The gradient of the slot's parameter is there; returns whether the bucket is ready now."""
        self._is_put[slot] = True
        self._pending -= 1
        self.waiting.append(slot)
        return self._pending == 0

    def pack(self, scale: float) -> None:
        """Copy the gradients that were put since the last time into the buffer, multiplied by `scale`.

        Parameters without a gradient count as having one of zeros.
        """
        fused: dict[int, Tensor] = {}
        for slot in sorted(self.waiting):  # the order of the buffer, which is kinder to the cache
            gradient = self.parameters[slot].grad
            if gradient is None:
                self.views[slot].zero_()
                self._absent.append(slot)
            elif self._fused[slot]:
                fused[slot] = gradient
            else:
                torch.mul(gradient.detach(), scale, out=self.views[slot])
                self._moved([slot])
        self._pack_fused(fused, scale)
        self.waiting = []

    @torch.no_grad()
    def _pack_fused(self, gradients: dict[int, Tensor], scale: float) -> None:
        moved = [slot for slot, gradient in gradients.items() if gradient is not self.views[slot]]
        if moved:
            torch._foreach_copy_([self.views[slot] for slot in moved], [gradients[slot] for slot in moved])
            self._moved(moved)
        if scale == 1.0 or not gradients:
            return
        if len(gradients) == len(self.views):
            self.buffer.mul_(scale)
        else:
            torch._foreach_mul_([self.views[slot] for slot in gradients], scale)

    def _moved(self, slots: list[int]) -> None:
        """These gradients have been copied into their views."""

    def all_reduce(self, group: dist.ProcessGroup) -> "torch.futures.Future[Any]":
        """Start to add the buffer up over the ranks of `group`, in place; returns at once."""
        return group.allreduce([self.buffer]).get_future()  # less Python than dist.all_reduce

    def copy_out(self, averages: Tensor | None = None, *, unused: frozenset[int] = frozenset()) -> None:
        """Overwrite the parameters' gradients with the averages.

        Args:
            averages: Flat tensor as long as `buffer`. None: they are in `buffer`.
            unused: Parameter indices whose gradient is left as it is, also where that is None.
        """
        views = self.views if averages is None else self.views_of(averages)
        gradients = [parameter.grad for parameter in self.parameters]
        if not unused and all(gradient is not None for gradient in gradients):
            torch._foreach_copy_(gradients, views)  # type: ignore[arg-type]  # none is None
            return
        for index, parameter, view in zip(self.indices, self.parameters, views, strict=True):
            if index in unused:
                continue
            if parameter.grad is None:  # another rank had one
                parameter.grad = view.clone()
            else:
                parameter.grad.copy_(view)

    def zeros(self) -> "Bucket":
        """The same bucket with a buffer of its own, full of zeros: what a rank without gradients contributes."""
        shadow = copy.copy(self)
        shadow.buffer = torch.zeros_like(self.buffer)
        shadow.views = self.views_of(shadow.buffer)
        return shadow

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Consecutive pieces of `flat`, each with its parameter's shape and memory format, for speed."""
        flat = flat.contiguous()
        views = []
        offset = flat.storage_offset()
        for parameter in self.parameters:
            strides = torch.empty_like(parameter, device="meta").stride()  # dense, whatever the parameter's are
            views.append(flat.as_strided(parameter.size(), strides, offset))
            offset += parameter.numel()
        return views


class ViewBucket(Bucket):
    """A bucket whose views *are* the gradients once they have been put: nothing is copied out, less memory.

    A gradient that autograd made anew, because the last was set to None, is copied once and becomes a view.
    """

    def _make_buffer(self) -> None:
        super()._make_buffer()
        self._sizes_bytes = [size_bytes(parameter) for parameter in self.parameters]
        for slot, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.views[slot].copy_(parameter.grad)
                self._moved([slot])

    def reset(self) -> None:
        """See `Bucket.reset`."""
        super().reset()
        self._waiting_bytes = 0

    def put(self, slot: int) -> bool:
        """See `Bucket.put`."""
        if self.parameters[slot].grad is not self.views[slot]:
            self._waiting_bytes += self._sizes_bytes[slot]
        return super().put(slot)

    @property
    def pack_early(self) -> bool:  # type: ignore[override]  # never set
        """Whether so many gradients wait that the memory they hold should be freed."""
        return self._waiting_bytes > MOST_WAITING_BYTES

    def pack(self, scale: float) -> None:
        """See `Bucket.pack`."""
        super().pack(scale)
        self._waiting_bytes = 0

    def _moved(self, slots: list[int]) -> None:
        for slot in slots:
            self.parameters[slot].grad = self.views[slot]

    def copy_out(self, averages: Tensor | None = None, *, unused: frozenset[int] = frozenset()) -> None:
        """Put the averages where they are not yet; see `Bucket.copy_out`."""
        if averages is not None:
            self.buffer.copy_(averages)
        self._moved([slot for slot in self._absent if self.indices[slot] not in unused])


class SparseBucket(Bucket):
    """The bucket of one parameter whose gradient is a sparse tensor; that tensor itself is the buffer."""

    def _make_buffer(self) -> None:
        (parameter,) = self.parameters
        self.buffer = torch.zeros_like(parameter, layout=torch.sparse_coo)
        self.views = [self.buffer]

    def put(self, slot: int) -> bool:
        """See `Bucket.put`."""
        self._is_put[slot] = True
        self._pending = 0
        self.waiting.append(slot)
        return True

    def pack(self, scale: float) -> None:
        """Scale it in place."""
        if not self.waiting:
            return
        self.waiting = []
        gradient = self.parameters[0].grad
        if gradient is None:
            self._make_buffer()
        else:
            self.buffer = gradient.detach().mul_(scale)
            self.views = [self.buffer]

    def zeros(self) -> "Bucket":
        """The same bucket, empty; see `Bucket.zeros`."""
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


def lead_in(elements: Iterable[int], line: int) -> int:
    """Elements to leave free before a buffer, so that most of it is in slots that begin at a cache line.

    Without them one slot of odd size, as a classifier's 1000 biases have it, moves all slots after it off the lines,
    and copying into those takes half as long again.

    Args:
        elements: Of each slot; the slots follow each other.
        line: Elements that a cache line holds.
    """
    aligned: Counter[int] = Counter({0: 0})  # elements of the slots that would begin at a line, by lead-in
    ends = list(accumulate(elements, initial=0))
    for begin, end in pairwise(ends):
        aligned[-begin % line] += end - begin
    return max(aligned, key=lambda lead: (aligned[lead], -lead))


@dataclass(frozen=True, kw_only=True)
class Features:
    """What a reducer does beyond the plain case; see the arguments of `DistributedDataParallel`."""

    find_unused_parameters: bool = False
    skip_all_reduce_unused_params: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    batched_grad_copy: bool = False

    @property
    def graph_may_change(self) -> bool:
        """Whether each iteration finds its own unused parameters; then ready order says nothing of the next."""
        return self.find_unused_parameters and not self.static_graph


class Layout:
    """All buckets of a reducer, in launch order.

    Args:
        parameters: Trainable parameters in index order.
        buckets: Parameter indices by bucket, in launch order.
        rebuild_caps_bytes: Caps for the rebuild in ready order. None: `buckets` stays.
        sparse: Parameter indices whose gradients are sparse tensors.
        features: See `Features`.

    Attributes:
        buckets: The buckets, in launch order.
        places: Bucket index and slot of each parameter, by parameter index.
        rebuilt: Whether the buckets have been rebuilt.
        features: As given.
        initial_sizes_bytes: Sizes of the buckets at construction.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[Sequence[int]],
        *,
        rebuild_caps_bytes: Sequence[int] | None,
        sparse: frozenset[int],
        features: Features,
    ) -> None:
        self._parameters = parameters
        self._rebuild_caps = rebuild_caps_bytes
        self._sparse = sparse
        self.features = features
        self.rebuilt = False
        self._adopt(buckets)
        self.initial_sizes_bytes = [bucket.size_bytes for bucket in self.buckets]

    @property
    def indices(self) -> tuple[tuple[int, ...], ...]:
        """Parameter indices by bucket, in launch order."""
        return tuple(bucket.indices for bucket in self.buckets)

    def _adopt(self, buckets: Sequence[Sequence[int]]) -> None:
        check_partition(buckets, len(self._parameters))
        self.buckets = [self._make_bucket(indices) for indices in buckets]
        places = {
            index: (number, slot)
            for number, bucket in enumerate(self.buckets)
            for slot, index in enumerate(bucket.indices)
        }
        self.places = [places[index] for index in range(len(places))]

    def _make_bucket(self, indices: Sequence[int]) -> Bucket:
        kind: type[Bucket] = ViewBucket if self.features.gradient_as_bucket_view else Bucket
        if self._sparse.intersection(indices):
            kind = SparseBucket
        return kind(indices, [self._parameters[i] for i in indices], batched=self.features.batched_grad_copy)

    def rebuild_if_due(self, ready_order: Sequence[int], group: dist.ProcessGroup) -> bool:
        """Rebuild in ready order, if that is known and it is the first time; returns whether it did.

        Args:
            ready_order: Parameter indices as their gradients became ready; empty: not known yet.
            group: Ranks that must rebuild alike. Rank 0's order counts, as ready orders may differ.
        """
        if not should_rebuild(
            rebuilt=self.rebuilt,
            fixed=self._rebuild_caps is None or self.features.graph_may_change,
            has_ready_order=bool(ready_order),
        ):
            return False
        assert self._rebuild_caps is not None
        never_ready = sorted(set(range(len(self._parameters))) - set(ready_order))  # what a static graph leaves out
        order = torch.tensor([*ready_order, *never_ready], device=self._parameters[0].device)
        dist.broadcast(order, group_src=0, group=group)
        self.buckets = []  # frees the old buffers before the new ones are made
        self._adopt(
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
