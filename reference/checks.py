"""Checks of the gradients that arrive, and of how the user's script calls forward and backward."""

import warnings
from collections.abc import Callable, Sequence

from torch import Tensor

from .bucket import Bucket
from .diagnosis import Diagnosis


class GradientCheck:
    """Whether gradients fit into their buckets."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        self._diagnosis = diagnosis
        self._warned_of_graph = False
        self.thorough = True
        """Whether to look at every gradient, and at its strides; set it again when the buckets are new."""

    def converted(self, buckets: Sequence[Bucket]) -> str | None:
        """Whether the module has been converted since it was wrapped; None: no."""
        for number, bucket in enumerate(buckets):
            parameter, buffer = bucket.parameters[0], bucket.buffer
            if parameter.dtype != buffer.dtype or parameter.device != buffer.device:
                return self._diagnosis.converted(bucket.indices[0], number, parameter, buffer)
        return None

    def complaint(self, bucket: Bucket, number: int, slots: Sequence[int]) -> str | None:
        """What is wrong with the gradients of these slots; None: nothing. Warns of what is only slow."""
        for slot in slots:
            gradient = bucket.parameters[slot].grad
            if gradient is None:
                continue
            index, view = bucket.indices[slot], bucket.views[slot]
            if gradient.dtype != view.dtype or gradient.device != view.device or gradient.layout != view.layout:
                return self._diagnosis.mismatch(index, number, gradient, view)
            if self.thorough and not view.is_sparse and _dense_strides(gradient) != _dense_strides(view):
                warnings.warn(self._diagnosis.strides(index, gradient, view), stacklevel=2)
                self.thorough = False  # once is enough
            if gradient.requires_grad and not self._warned_of_graph:
                warnings.warn(self._diagnosis.graph_not_averaged(index), stacklevel=2)
                self._warned_of_graph = True
        return None


def _dense_strides(tensor: Tensor) -> list[int]:
    """Strides of the dimensions that have more than one element; the others mean nothing."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


class WishCheck:
    """Whether forward and backward were both inside, or both outside, `no_sync`.

    Args:
        diagnosis: Makes the message.
        wants_averages: What the user's script wants at the moment.
    """

    def __init__(self, diagnosis: Diagnosis, wants_averages: Callable[[], bool]) -> None:
        self._diagnosis = diagnosis
        self._wants_averages = wants_averages
        self._in_forward: bool | None = None

    def forward_done(self, *, averaging: bool) -> None:
        """A forward pass decided whether its gradients are averaged."""
        self._in_forward = averaging

    def gradient_arrived(self) -> None:
        """Compare with the first gradient that follows, and warn."""
        if self._in_forward is not None and self._in_forward != self._wants_averages():
            warnings.warn(self._diagnosis.changed_mind(averaged=self._in_forward), stacklevel=2)
        self._in_forward = None
