"""Kinds of buckets: views that are the gradients, memory only in backward passes, and sparse gradients."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..bucket_memory import ScaledCopies
from ..buckets import MOST_WAITING_BYTES, Bucket
from ..constructor_arguments import Options


def make_bucket(
    indices: Sequence[int], parameters: Sequence[nn.Parameter], *, options: Options, sparse: Sequence[bool]
) -> Bucket:
    """A bucket of the kind that the options need; `sparse`: whether gradients are, by parameter index."""
    kind: type[Bucket] = LazyBucket if options.lazy_bucket_allocation else Bucket
    if options.gradient_as_bucket_view:
        kind = ViewBucket
    if any(sparse[index] for index in indices):
        kind = SparseBucket
    return kind(indices, parameters, batched=options.batched_grad_copy)


class ViewBucket(Bucket):
    """A bucket whose views *are* the gradients once they have been packed: less memory, nothing to copy out.

    A gradient that autograd allocated anew, because the last one was set to None, is copied once and becomes a view.
    """

    _most_waiting_bytes = MOST_WAITING_BYTES  # on all devices: until then each takes memory beside its view

    def reset(self) -> None:
        """See `Bucket.reset`.

        `module.to(memory_format=...)` moves the gradients, hence the views, to memory of their own; they are made
        again, and the gradients copied as those that autograd allocates.
        """
        super().reset()
        if list(map(Tensor.data_ptr, self.views)) != self._addresses:
            self.views[:] = [view.detach() for view in self._unseen_views]

    def pack(self, scale: float) -> None:
        """See `Bucket.pack`."""
        packed = self.waiting
        super().pack(scale)
        for slot in packed:
            if self.parameters[slot].grad is not None:
                self.parameters[slot].grad = self.views[slot]

    def _make_buffer(self) -> None:
        super()._make_buffer()
        self._addresses = [view.data_ptr() for view in self.views]
        self._unseen_views = [view.detach() for view in self.views]  # which the script cannot move
        for slot, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.views[slot].copy_(parameter.grad)
                parameter.grad = self.views[slot]

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

    def replaced(self, unused: frozenset[int]) -> int | None:
        """See `Bucket.replaced`: another wrapper has the parameter too, or the script has set its gradient."""
        for index, parameter, view in zip(self.indices, self.parameters, self.views, strict=True):
            if parameter.grad is not view and index not in unused:
                return index
        return None


class LazyBucket(Bucket):
    """A bucket whose buffer exists from its first packed gradient until its averages are copied out.

    So it takes no memory beside the activations of a forward pass (torch: `lazy_bucket_allocation`).
    """

    def _make_buffer(self) -> None:
        super()._make_buffer()
        copies = ScaledCopies(self.buffer, self.views, batched=self._batched)
        self._without_memory = self.buffer, self.views, copies  # these keep shapes, strides and offsets
        self.buffer.untyped_storage().resize_(0)

    def reset(self) -> None:
        """See `Bucket.reset`."""
        super().reset()
        self._release()

    def pack(self, scale: float) -> None:
        """See `Bucket.pack`."""
        if self.buffer is self._without_memory[0]:
            flat, views, _ = self._without_memory
            lead = flat.storage_offset()
            self.buffer = flat.new_empty(lead + flat.numel())[lead:]
            self.views = [self.buffer.as_strided(v.size(), v.stride(), v.storage_offset()) for v in views]
            self._copies = ScaledCopies(self.buffer, self.views, batched=self._batched)
        super().pack(scale)

    def copy_out(self, averages: Tensor | None = None, *, unused: frozenset[int] = frozenset()) -> None:
        """See `Bucket.copy_out`."""
        super().copy_out(averages, unused=unused)
        self._release()

    def _release(self) -> None:
        self.buffer, self.views, self._copies = self._without_memory


class SparseBucket(Bucket):
    """The bucket of one parameter whose gradient is a sparse tensor; that tensor itself is the buffer.

    The gradient has one sparse dimension, as that of an embedding: Gloo requires the same number on all ranks.
    """

    def _make_buffer(self) -> None:
        (parameter,) = self.parameters
        rows = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
        empty = rows, parameter.new_empty((0, *parameter.shape[1:])), parameter.shape
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
        averages = self.buffer if averages is None else averages.to(parameter.dtype)
        if self.indices[0] in unused:
            return
        if parameter.grad is None:
            parameter.grad = averages
        elif parameter.grad is not averages:
            parameter.grad.copy_(averages)
