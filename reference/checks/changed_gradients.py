"""Gradients that change after they have arrived: by the script, or with another gradient in the same memory.

Also optimisers that step before the gradients are averaged.
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..backward_pass import Expecting, Idle, Reduction, Running, Snapshot
from ..buckets import Bucket
from .error_messages import Text

if TYPE_CHECKING:
    from ..reducer import Reducer


class ChangedGradients(dict[int, tuple[Tensor, int]]):
    """Each gradient and its version when it arrived, by parameter index, to be compared when its bucket is packed.

    Torch's class copies a gradient when it arrives, so a change between the two would have no effect there.
    """

    def arrived(self, index: int, gradient: Tensor | None) -> None:
        """Note the gradient of a parameter index; None: it was undefined."""
        if gradient is not None:
            self[index] = gradient, version_of(gradient)

    def first_changed(self, bucket: Bucket) -> int | None:
        """The index of a parameter in the bucket whose waiting gradient has changed; None: none has."""
        for slot in bucket.waiting:
            arrived, now = self.pop(bucket.indices[slot], None), bucket.parameters[slot].grad
            if arrived is not None and (now is not arrived[0] or version_of(now) != arrived[1]):
                return bucket.indices[slot]
        return None


def snapshot(parameters: Sequence[nn.Parameter]) -> Snapshot:
    """What shows at a later time whether the script has set or changed gradients."""
    gradients = [parameter.grad for parameter in parameters]
    return [(0, 0) if gradient is None else (id(gradient), gradient._version) for gradient in gradients]


def warn_of_changes(reducer: "Reducer", reduction: Reduction) -> None:
    """Warn if the script changed gradients between two backward passes that contribute to one reduction."""
    if (reducer.options.gradient_as_bucket_view and reducer.hook is not None) or reducer.optimizers_in_backward:
        return  # a comm hook may write into the gradients at any time
    now = snapshot(reducer.parameters)
    changed = next((index for index in reduction.arrived if reduction.before[index] != now[index]), None)
    if changed is not None:
        reducer.messages.warn_once(Text.CHANGED_BETWEEN, changed)


def watch_steps(reducer: "Reducer") -> None:
    """Warn once if an optimiser steps with gradients that wait to be averaged, or that the script has set."""
    this = weakref.ref(reducer)

    def before_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        alive = this()
        if alive is not None and not (isinstance(alive.state, Idle) and alive.without_gradients is None):
            _check_step(alive, optimizer)

    weakref.finalize(reducer, register_optimizer_step_pre_hook(before_step).remove)


def _check_step(reducer: "Reducer", optimizer: Optimizer) -> None:
    own = {id(parameter): index for index, parameter in enumerate(reducer.parameters)}
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    stepped = [own[id(p)] for p in held if p.grad is not None and id(p) in own]
    match reducer.state:
        case Running(reduction=Reduction(averaged=False)) if not reducer.optimizers_in_backward:
            when, wrong = "during the backward pass", stepped
        case Expecting(Reduction(begun=True) as waiting) if not reducer.optimizers_in_backward:
            complete = waiting.next_bucket == len(reducer.buckets)
            when = "before finalize_backward()" if complete else "after a backward pass that left gradients out"
            if wrong := [index for index in stepped if index in waiting.arrived]:
                reducer.check_not_converted(range(len(reducer.parameters)))  # the cause, if one was
        case Idle() | Expecting() if (before := reducer.without_gradients) is not None:
            when = "after a pass that brought no gradients, as torch.autograd.grad,"
            now = snapshot(reducer.parameters)
            wrong = [index for index in stepped if now[index][0] != before[index][0]]
        case _:
            return
    if wrong:
        reducer.messages.warn_once(Text.STEPPED_TOO_EARLY, min(wrong), when=when)


def misfit(reducer: "Reducer", reduction: Reduction, number: int, slot: int) -> str | None:
    """Why a gradient in bucket `number` cannot be averaged, None: it can; see `Bucket.misfits`."""
    bucket = reducer.buckets[number]
    index = bucket.indices[slot]
    if bucket.parameters[slot].grad is not None:
        return reducer.messages.misfit(bucket, number, slot)
    arrived = index in reduction.arrived and index not in reducer.inbox.undefined
    if arrived and bucket.parameters[slot].requires_grad:  # if frozen since forward, nothing was accumulated
        return reducer.messages.message(Text.REMOVED, index, number)
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
