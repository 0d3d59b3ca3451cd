"""One bucket: a flat buffer, one view a parameter, and how far along it is."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .parameters import size_bytes

# A gradient of at least this many elements is copied the moment it arrives, while the cache still holds it;
# a smaller one costs more to launch than to copy and waits for its bucket's one fused copy. On a GPU all wait.
COPIED_ON_ARRIVAL = 16 * 1024


class Bucket:
    """Gradients that travel together in one all-reduce.

    An iteration takes it through three steps: `put` once per parameter (it is *ready* after the last), a
    collective over `buffer` by whoever owns the bucket, `copy_out`; `reset` begins the next. The bucket owns
    its buffer; parameters keep gradients of their own, which `put` reads and `copy_out` overwrites.

    Args:
        indices: Parameter index of each slot.
        parameters: The parameters themselves, slot by slot; all of one dtype on one device.
        batched: Whether large gradients too wait for the fused copy.

    Attributes:
        buffer: Flat tensor of the bucket's size; the all-reduce works in place on it.
        views: Slot by slot a view of `buffer` with its parameter's shape and memory format.
        pending_slots: Slots whose gradient has not been put yet.
    """

    buffer: Tensor

    def __init__(self, indices: Sequence[int], parameters: Sequence[nn.Parameter], *, batched: bool = False) -> None:
        self.indices = tuple(indices)
        self.parameters = list(parameters)
        self._make_buffer()
        waits = batched or self.parameters[0].device.type != "cpu"
        self._waits = [waits or parameter.numel() < COPIED_ON_ARRIVAL for parameter in self.parameters]
        self._waiting: list[int] = []
        self.reset()

    def __repr__(self) -> str:
        return f"Bucket(parameters {list(self.indices)}, {self.size_bytes} bytes, {len(self.pending_slots)} pending)"

    def _make_buffer(self) -> None:
        first = self.parameters[0]
        elements = sum(parameter.numel() for parameter in self.parameters)
        self.buffer = torch.empty(elements, dtype=first.dtype, device=first.device)
        self.views = self.views_of(self.buffer)

    @property
    def size_bytes(self) -> int:
        """Bytes that its all-reduce moves."""
        return sum(map(size_bytes, self.parameters))

    @property
    def ready(self) -> bool:
        """Whether every gradient has been put."""
        return not self.pending_slots

    def reset(self) -> None:
        """Expect every gradient anew."""
        self.pending_slots = set(range(len(self.parameters)))
        self._waiting.clear()

    def put(self, slot: int, scale: float) -> None:
        """Take the gradient of the slot's parameter, multiplied by `scale`; zeros where it has none.

        A small one is only noted: all such are copied and scaled together when the last slot is put.
        """
        self.pending_slots.remove(slot)
        gradient = self.parameters[slot].grad
        if gradient is None:
            self.views[slot].zero_()
        elif self._waits[slot]:
            self._waiting.append(slot)
        else:
            self._put_at_once(slot, gradient.detach(), scale)
        if self._waiting and not self.pending_slots:
            self._put_waiting(scale)

    def _put_at_once(self, slot: int, gradient: Tensor, scale: float) -> None:
        torch.mul(gradient, scale, out=self.views[slot])  # one pass over memory: copying and scaling

    def _put_waiting(self, scale: float) -> None:
        views = [self.views[slot] for slot in self._waiting]
        gradients = [self.parameters[slot].grad for slot in self._waiting]
        with torch.no_grad():
            torch._foreach_copy_(views, gradients)  # type: ignore[arg-type]  # put has seen that none is None
            self._scale(views, scale)

    def _scale(self, views: list[Tensor], scale: float) -> None:
        if len(views) == len(self.views):
            self.buffer.mul_(scale)
        else:
            torch._foreach_mul_(views, scale)

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
        """Consecutive pieces of `flat`, each with its parameter's shape and memory format: copies run at full speed."""
        views = []
        offset = 0
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
        self._addresses = [view.data_ptr() for view in self.views]
        for slot, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.views[slot].copy_(parameter.grad)
                parameter.grad = self.views[slot]

    def _put_at_once(self, slot: int, gradient: Tensor, scale: float) -> None:
        if gradient.data_ptr() == self._addresses[slot]:
            self._waiting.append(slot)  # already in its place: scaled with the others
        else:
            super()._put_at_once(slot, gradient, scale)
            self.parameters[slot].grad = self.views[slot]

    def _put_waiting(self, scale: float) -> None:
        with torch.no_grad():
            self._adopt([slot for slot in self._waiting if not self._is_view(slot)])
            self._scale([self.views[slot] for slot in self._waiting], scale)

    def _adopt(self, slots: list[int]) -> None:
        if slots:
            gradients = [self.parameters[slot].grad for slot in slots]
            torch._foreach_copy_([self.views[slot] for slot in slots], gradients)  # type: ignore[arg-type]  # as above
        for slot in slots:
            self.parameters[slot].grad = self.views[slot]

    def _is_view(self, slot: int) -> bool:
        gradient = self.parameters[slot].grad
        return gradient is not None and gradient.data_ptr() == self._addresses[slot]

    def copy_out(self, averages: Tensor | None = None, *, unused: frozenset[int] = frozenset()) -> None:
        """Put the averages where they are not yet; see `Bucket.copy_out`."""
        if averages is not None:
            self.buffer.copy_(averages)
        for slot, index in enumerate(self.indices):
            if index not in unused and self.parameters[slot].grad is None:
                self.parameters[slot].grad = self.views[slot]


class SparseBucket(Bucket):
    """The bucket of one parameter whose gradient is a sparse tensor; that tensor itself is the buffer."""

    def _make_buffer(self) -> None:
        (parameter,) = self.parameters
        self.buffer = torch.sparse_coo_tensor(size=parameter.shape, dtype=parameter.dtype, device=parameter.device)
        self.views = [self.buffer]

    def put(self, slot: int, scale: float) -> None:
        """Take the gradient, scaled in place; an empty one where there is none."""
        self.pending_slots.remove(slot)
        gradient = self.parameters[slot].grad
        if gradient is None:
            self._make_buffer()
        else:
            self.buffer = gradient.detach().mul_(scale)

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
