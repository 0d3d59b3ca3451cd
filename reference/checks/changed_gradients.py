"""Gradients that change after they have arrived: by the script, or with another gradient in the same memory."""

import torch
from torch import Tensor, nn

from ..buckets import Bucket


class ChangedGradients:
    """Notes each gradient and its version when it arrives, and compares them when its bucket is packed.

    Torch's class copies a gradient when it arrives, so a change between the two would have no effect there.
    """

    def __init__(self) -> None:
        self._as_arrived: dict[int, tuple[Tensor, int]] = {}  # by parameter index

    def arrived(self, index: int, gradient: Tensor | None) -> None:
        """Note the gradient of a parameter index; None: it was undefined."""
        if gradient is not None:
            self._as_arrived[index] = gradient, version_of(gradient)

    def first_changed(self, bucket: Bucket) -> int | None:
        """The index of a parameter in the bucket whose waiting gradient has changed; None: none has."""
        for slot in bucket.waiting:
            arrived, now = self._as_arrived.pop(bucket.indices[slot], None), bucket.parameters[slot].grad
            if arrived is not None and (now is not arrived[0] or version_of(now) != arrived[1]):
                return bucket.indices[slot]
        return None


def separate(parameter: nn.Parameter, index: int, owners: dict[int, int]) -> bool:
    """Copy a gradient that begins at the same address as another one, as those of `a.view(6) + b.view(6)` do.

    Averages that differ would overwrite each other there. `owners`: indices by the address of their gradients, which
    grows. Returns whether the gradient was copied. Parts of one buffer begin at different addresses, and stay.
    """
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided or not (address := gradient.data_ptr()):
        return False
    if owners.setdefault(address, index) == index:
        return False
    parameter.grad = gradient.clone()
    return True


def version_of(gradient: Tensor) -> int:
    """How often a gradient was changed; 0 for a part of a buffer, whose parts are counted together."""
    if gradient.is_sparse or gradient._is_view() or gradient.untyped_storage().nbytes() != gradient.nbytes:
        return 0
    return gradient._version
