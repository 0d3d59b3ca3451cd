"""The sink: one autograd node behind all outputs of forward, the first of the module's backward pass."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_structure, tree_unflatten

from ..autograd_hooks import call_at_backward, not_traced, parts_of, tensors_in

SECOND_PASS = (
    "expected one backward pass for each forward pass, got another one. With find_unused_parameters or static_graph, "
    "the first one runs through all outputs of forward: call backward once, on the sum of the losses"
)


def through_sink(output: Any, on_backward: Callable[[], None], *, clone: bool = True) -> Any:
    """Pass tensors in `output` that have a `grad_fn` through one autograd node, the *sink*; returns the new output.

    The sink is the first node of the module's backward pass, so `on_backward` is called in the outermost backward
    pass, before any re-entrant one that checkpointing starts. The sink passes on a gradient, possibly undefined, for
    *every* tensor, so the nodes that accumulate gradients also run for parameters behind an output that the loss
    ignores. With `clone`, the caller may change the tensors in place (torch: `_set_ddp_sink_clone`).
    """
    inputs = list({id(tensor): tensor for tensor in tensors_in(output) if tensor.grad_fn is not None}.values())
    if not inputs:
        return output
    passed = dict(zip(map(id, inputs), _Sink.apply(on_backward, clone, *inputs), strict=True))  # type: ignore[no-untyped-call]
    changed = map_tensors(lambda tensor: passed.get(id(tensor), tensor), output)
    call_at_backward((tensor for tensor in tensors_in(changed) if id(tensor) in passed), on_backward)
    return changed


class _Sink(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, on_backward: Callable[[], None], clone: bool, *inputs: Tensor) -> tuple[Tensor, ...]:  # noqa: FBT001 - autograd functions take no keywords
        context.set_materialize_grads(False)  # an undefined gradient stays undefined
        context.on_backward = on_backward
        return tuple(tensor.clone() for tensor in inputs) if clone else inputs

    @staticmethod
    @not_traced
    def backward(context: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        try:
            context.saved_tensors  # noqa: B018 - there are none, but autograd has dropped them after a first pass
        except RuntimeError:
            raise RuntimeError(SECOND_PASS) from None
        context.on_backward()
        return (None, None, *gradients)


def map_tensors(change: Callable[[Tensor], Tensor], output: Any, around: frozenset[int] = frozenset()) -> Any:
    """The same structure with every tensor replaced by `change(tensor)`; a part without tensors stays as it is.

    So does a part of a class that permits no copies, and a part inside itself; `around` has the `id`s of the parts
    around `output`. Constructors of lists and tuples are not called, because a subclass may have one of its own.
    """
    if isinstance(output, Tensor):
        return change(output)
    if id(output) in around or not any(True for _ in tensors_in(output)):
        return output
    try:
        return _with_parts(output, [map_tensors(change, part, around | {id(output)}) for part in parts_of(output)])
    except Exception:  # noqa: BLE001 - the class's own code may raise anything
        return output


def _with_parts(output: Any, parts: list[Any]) -> Any:
    if isinstance(output, tuple):
        if hasattr(output, "n_fields"):  # a type of torch.return_types
            return type(output)(parts)
        twin: Any = tuple.__new__(type(output), parts)
        if hasattr(output, "__dict__"):
            twin.__dict__.update(output.__dict__)
        return twin
    if not (isinstance(output, list | dict) or dataclasses.is_dataclass(output)):  # a registered pytree node
        return tree_unflatten(parts, tree_structure(output))
    twin = copy.copy(output)  # keeps the class and other attributes
    if isinstance(output, list):
        list.__setitem__(twin, slice(None), parts)
    elif isinstance(output, dict):
        for key, part in zip(output, parts, strict=True):
            twin[key] = part
    else:
        filled = (field for field in dataclasses.fields(output) if hasattr(output, field.name))
        for field, part in zip(filled, parts, strict=True):
            object.__setattr__(twin, field.name, part)  # frozen ones too
    return twin
