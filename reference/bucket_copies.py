"""Copies of gradients into a bucket: fused for small gradients."""

from collections.abc import Sequence
from itertools import accumulate
from operator import is_

import torch
from torch import Tensor

LARGE_ELEMENTS = 16 * 1024
"""On a CPU, a gradient of at least this many elements is copied and scaled by an operation of its own, in one pass
over memory. For smaller gradients the start of an operation costs more than the copy, so one fused operation copies
many of them. On a GPU, fused operations copy gradients of all sizes."""


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
