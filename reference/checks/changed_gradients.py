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


def separate(parameter: nn.Parameter, owners: dict[int, nn.Parameter]) -> bool:
    """Copy a gradient that begins at the same address as another one, as those of `a.view(6) + b.view(6)` do.

    Averages that differ would overwrite each other there. `owners`: parameters by the address of their gradients,
    which grows; an owner whose gradient has become a view of a bucket has left its address to later gradients.
    Returns whether the gradient was copied. Parts of one buffer begin at different addresses, and stay.
    """
    address = _address(parameter)
    if address is None:
        return False
    owner = owners.get(address, parameter)
    if owner is parameter or _address(owner) != address:
        owners[address] = parameter
        return False
    parameter.grad = parameter.grad.clone()  # type: ignore[union-attr]  # it has an address
    return True


def _address(parameter: nn.Parameter) -> int | None:
    """Where the parameter's gradient begins; None: it has no gradient, an empty one or a sparse one."""
    gradient = parameter.grad
    return gradient.data_ptr() or None if gradient is not None and gradient.layout is torch.strided else None


def version_of(gradient: Tensor) -> int:
    """How often a gradient was changed; 0 for a part of a buffer, whose parts are counted together."""
    if gradient.is_sparse or gradient._is_view() or gradient.untyped_storage().nbytes() != gradient.nbytes:
        return 0
    return gradient._version
