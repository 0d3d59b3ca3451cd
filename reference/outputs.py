"""What a module returns: the tensors in it, however they are nested, and a look at their backward pass."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves, tree_map

Change = Callable[[Tensor], Tensor]


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Every tensor in lists, tuples, named tuples, dicts, dataclasses and registered pytree nodes, to any depth."""
    if isinstance(output, Tensor):
        yield output
    else:
        for part in _parts(output):
            yield from tensors_in(part)


def map_tensors(change: Change, output: Any) -> Any:
    """The same structure with every tensor replaced by `change(tensor)`; what holds none is kept as it is."""
    if isinstance(output, Tensor):
        return change(output)
    if not any(True for _ in tensors_in(output)):
        return output
    if isinstance(output, dict):
        changed = copy.copy(output)  # keeps the class, and whatever else it holds
        for key, part in output.items():
            changed[key] = map_tensors(change, part)
        return changed
    if isinstance(output, list):
        return type(output)(map_tensors(change, part) for part in output)
    if isinstance(output, tuple):
        parts = [map_tensors(change, part) for part in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    if not dataclasses.is_dataclass(output):  # a registered pytree node
        return tree_map(lambda part: change(part) if isinstance(part, Tensor) else part, output)
    twin: Any = copy.copy(output)
    for field in dataclasses.fields(output):
        object.__setattr__(twin, field.name, map_tensors(change, getattr(output, field.name)))  # frozen ones too
    return twin


def _parts(output: Any) -> list[Any]:
    if isinstance(output, list | tuple):
        return list(output)
    if isinstance(output, dict):
        return list(output.values())
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [getattr(output, field.name) for field in dataclasses.fields(output)]
    return tree_leaves(output) if type(output) in SUPPORTED_NODES else []


def through_sink(output: Any, on_backward: Callable[[], None], *, clone: bool = True) -> Any:
    """`output` with all of its differentiable tensors passed through one autograd node, the *sink*.

    The sink is the first node of the backward pass, so `on_backward` is called in the outermost one, before
    any re-entrant pass that checkpointing starts. And as the sink hands on a gradient, perhaps undefined, for
    *every* tensor, also the parameters behind an output that the loss ignores hear of the backward pass.

    Args:
        output: What forward returned.
        on_backward: Called when the backward pass begins.
        clone: Whether the caller may change the tensors in place. (torch: `_set_ddp_sink_clone`)
    """
    inputs = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
    if not inputs:
        return output
    passed = iter(_Sink.apply(on_backward, clone, *inputs))  # type: ignore[no-untyped-call]
    return map_tensors(lambda tensor: tensor if tensor.grad_fn is None else next(passed), output)


class _Sink(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, on_backward: Callable[[], None], clone: bool, *inputs: Tensor) -> tuple[Tensor, ...]:  # noqa: FBT001 - autograd functions take no keywords
        context.set_materialize_grads(False)  # an undefined gradient stays undefined
        context.on_backward = on_backward
        return tuple(tensor.clone() for tensor in inputs) if clone else inputs

    @staticmethod
    def backward(context: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        context.on_backward()
        return (None, None, *gradients)
