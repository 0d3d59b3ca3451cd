"""The memory of a bucket: an aligned buffer, a view of it for each parameter, and fused copies into the views."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from operator import is_

import torch
from torch import Tensor

CACHE_LINE_BYTES = 64
LARGE_ELEMENTS = 16 * 1024
"""On a CPU, a gradient of at least this many elements is copied and scaled by an operation of its own, in one pass
over memory. For smaller gradients the start of an operation costs more than the copy, so one fused operation copies
many of them. On a GPU, fused operations copy gradients of all sizes."""


def aligned_buffer(parameters: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """An uninitialised flat buffer for the parameters' gradients, aligned to a CPU's cache lines, and its views."""
    first, elements = parameters[0], [parameter.numel() for parameter in parameters]
    lead = lead_in(elements, CACHE_LINE_BYTES // first.element_size()) if first.device.type == "cpu" else 0
    buffer = torch.empty(lead + sum(elements), dtype=first.dtype, device=first.device)[lead:]
    return buffer, views_of(buffer, parameters)


def views_of(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Consecutive pieces of `flat`, each with its parameter's shape and memory format: copies are then fast."""
    flat = flat.contiguous()
    views = []
    offset = flat.storage_offset()
    for parameter in parameters:
        strides = torch.empty_like(parameter, device="meta").stride()  # dense, whatever the parameter's are
        views.append(flat.as_strided(parameter.size(), strides, offset))
        offset += parameter.numel()
    return views


def lead_in(elements: Iterable[int], line: int) -> int:
    """Elements to leave free before a buffer so that most of its bytes lie in slots that begin at a cache line.

    If a buffer starts at a cache line, one slot of odd size, such as a classifier's 1000 biases, shifts all slots
    after it off the cache lines, and copying into those slots takes half as long again.
    """
    aligned: Counter[int] = Counter({0: 0})  # elements of the slots that would begin at a line, by lead-in
    for begin, end in pairwise(accumulate(elements, initial=0)):
        aligned[-begin % line] += end - begin
    return max(aligned, key=lambda lead: (aligned[lead], -lead))


class ScaledCopies:
    """Copies gradients into `views`, consecutive pieces of `buffer`, and scales them, in few operations.

    The bucket may replace elements of the list `views`.

    `batched`: large gradients are copied by the fused operation too.
    """

    def __init__(self, buffer: Tensor, views: list[Tensor], *, batched: bool) -> None:
        self._buffer, self._views = buffer, views
        self._ends = list(accumulate((view.numel() for view in views), initial=0))
        all_fused = batched or buffer.device.type != "cpu"
        self._is_large = [not all_fused and view.numel() >= LARGE_ELEMENTS for view in views]
        self._all_small = not any(self._is_large)

    def copy(self, slots: Sequence[int], gradients: Sequence[Tensor], scale: float) -> None:
        """Copy the gradients of these slots, which ascend; a gradient that is its view already is only scaled."""
        if self._all_small:
            self._copy_fused(slots, gradients, scale)
            return
        small: tuple[list[int], list[Tensor]] = [], []
        for slot, gradient in zip(slots, gradients, strict=True):
            if self._is_large[slot]:
                torch.mul(gradient, scale, out=self._views[slot])
            else:
                small[0].append(slot)
                small[1].append(gradient)
        self._copy_fused(*small, scale)

    def _copy_fused(self, slots: Sequence[int], gradients: Sequence[Tensor], scale: float) -> None:
        if not slots:
            return
        first, end = slots[0], slots[-1] + 1
        neighbours = end - first == len(slots)
        views = self._views[first:end] if neighbours else [self._views[slot] for slot in slots]
        if any(map(is_, gradients, views)):
            pairs = [pair for pair in zip(views, gradients, strict=True) if pair[0] is not pair[1]]
            if pairs:
                torch._foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
        else:
            torch._foreach_copy_(views, list(gradients))
        if scale == 1.0:
            return
        if neighbours:  # one operation scales all of them
            self._buffer[self._ends[first] : self._ends[end]].mul_(scale)
        else:
            torch._foreach_mul_(views, scale)
