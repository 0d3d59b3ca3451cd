"""Gradients that change after they have arrived: by the script, or with another gradient in the same memory.

Also parameters that change before their gradients are averaged, as by an optimiser that steps too early.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..backward_pass import Reduction, Snapshot
from ..buckets import Bucket

if TYPE_CHECKING:
    from ..reducer import Reducer


class ChangedGradients:
    """Notes each gradient and its version when it arrives, and compares them when its bucket is packed.

    Torch's class copies a gradient when it arrives, so a change between the two would have no effect there.
    """

    def __init__(self) -> None:
        self._as_arrived: dict[int, tuple[Tensor, int]] = {}  # by parameter index
        self._parameter_versions: list[int] = []  # when the first gradient arrived

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note the versions of all parameters: the first gradient has arrived."""
        self._parameter_versions = [parameter._version for parameter in parameters]

    def arrived(self, index: int, parameter: nn.Parameter) -> bool:
        """Note the gradient of a parameter index; returns whether the parameter has changed since `begin`."""
        if parameter.grad is not None:
            self._as_arrived[index] = parameter.grad, version_of(parameter.grad)
        return parameter._version != self._parameter_versions[index]

    def first_changed(self, bucket: Bucket) -> int | None:
        """The index of a parameter in the bucket whose waiting gradient has changed; None: none has."""
        for slot in bucket.waiting:
            arrived, now = self._as_arrived.pop(bucket.indices[slot], None), bucket.parameters[slot].grad
            if arrived is not None and (now is not arrived[0] or version_of(now) != arrived[1]):
                return bucket.indices[slot]
        return None

    def forget(self) -> None:
        """An exception ended the backward pass: the gradients will not be packed, and must not stay in memory."""
        self._as_arrived.clear()


def snapshot(parameters: Sequence[nn.Parameter]) -> Snapshot:
    """The versions that show at a later time what the script has changed."""
    now = [(parameter._version, parameter.grad) for parameter in parameters]
    return [(version, 0, 0) if g is None else (version, id(g), g._version) for version, g in now]


def first_changed(before: Snapshot, now: Snapshot, indices: Iterable[int], *, only_parameters: bool) -> int | None:
    """The first of these parameter indices whose parameter or gradient has changed; None: none has."""
    length = 1 if only_parameters else 3
    return next((index for index in indices if before[index][:length] != now[index][:length]), None)


def first_assigned(before: Snapshot, now: Snapshot) -> int | None:
    """The first parameter index that has changed with a gradient which it had not `before`; None: none has."""
    for index, ((version, gradient, _), (new_version, new_gradient, _)) in enumerate(zip(before, now, strict=True)):
        if version != new_version and (not gradient or new_gradient not in (0, gradient)):
            return index
    return None


def warn_of_changes(reducer: "Reducer", reduction: Reduction) -> None:
    """Warn if the script used gradients between two backward passes that contribute to one reduction."""
    # A comm hook may write into the gradients at any time, if they are in its buckets.
    only_parameters = reducer.options.gradient_as_bucket_view and reducer.hook is not None
    now = snapshot(reducer.parameters)
    index = first_changed(reduction.before, now, reduction.arrived, only_parameters=only_parameters)
    if index is not None:
        reducer.messages.warn_once("between", reducer.messages.changed_between(index))


def warn_of_assigned(reducer: "Reducer", before: Snapshot) -> None:
    """Warn if the script set gradients after a backward pass that brought none, and stepped with them."""
    if (index := first_assigned(before, snapshot(reducer.parameters))) is not None:
        reducer.messages.warn_once("assigned", reducer.messages.assigned(index))


def misfit(reducer: "Reducer", reduction: Reduction, number: int, slot: int) -> str | None:
    """Why a gradient in bucket `number` cannot be averaged, None: it can; see `Bucket.misfits`."""
    bucket = reducer.buckets[number]
    index = bucket.indices[slot]
    if bucket.parameters[slot].grad is not None:
        return reducer.messages.misfit(bucket, number, slot)
    if index in reduction.arrived and index not in reducer.inbox.undefined:
        return reducer.messages.removed(index, number)
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
