"""Counts the FLOPs of a model and the bytes that it moves, without allocating its tensors.

A dispatch mode intercepts every operation of one forward and one backward pass. FLOPs follow the formulas of torch's
own FLOP counter; bytes are those of every tensor that the operation reads or writes, each counted once. Fake tensors
have shapes but no data, so even the largest model takes about a second and no memory.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock
from warnings import catch_warnings, filterwarnings

import torch
import torch.nn.functional as F  # noqa: N812 - as torch names it
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from . import models
from .reference.errors import ModelError
from .reference.parameters import trainable_parameters
from .reference.recorder import described_buffers, described_input, described_parameters
from .simulator.workload.roofline import GradientOperations, Operation, OperationKind, Operations, merge, sgd_step

aten = torch.ops.aten


def measure_operations(model: str, *, autocast: str | None = None) -> Operations:
    """Count FLOPs and bytes of one iteration of a model, by gradient, without allocating or computing anything.

    `model` is as for `--model`. Attention is counted as the fused kernel that torch chooses, on a GPU as on a
    processor. `autocast` is the element type of torch.autocast, "bfloat16" or "float16", under which a model with
    parameters in float32 runs; None: no autocast. Casts and activations are those on a processor, where
    normalisations keep the low precision that CUDA's autocast gives up, so the bytes are the least that a GPU moves.
    Raises ModelError if there is no such model, a parameter gets no gradient, or it does not run without data.
    """
    try:
        with without_data():
            module, loss_fn = models.build(model)
            with low_precision(module, autocast):
                operations = count_operations(module, loss_fn, model)
            return operations.model_copy(update={"batch": models.batch_of(model, loss_fn)})
    except ModelError as error:
        if error.__cause__ is None:  # a mistake with data too
            raise
        raise ModelError(
            f"{error}; if it runs there, it does not run on fake tensors, which have no data: make model and batch "
            "inside the callable, name no device, and use no values (.item(), .numpy(), `if tensor`); or record a "
            "trace of it (ddplab record)"
        ) from None


@contextmanager
def without_data() -> Iterator[None]:
    """Let models be made and run on fake tensors of a processor.

    Modules can be converted (`module.half()`), for which torch would swap tensors that have references. An RMS norm
    runs as a layer norm without bias: one kernel, as on a GPU, where a processor has ten. A deep copy of a tensor
    keeps its mode, which would be copied with it: torch's own `nn.TransformerEncoder` clones its layers. Torch warns
    that such a copy asks for an address, which is not used, and logs the stack of an error that is raised anyway.
    """
    takes_data = mock.patch.object(torch.utils, "swap_tensors", lambda old, new: setattr(old, "data", new))
    one_mode = mock.patch.object(FakeTensorMode, "__deepcopy__", lambda mode, _: mode, create=True)
    logs_nothing = mock.patch("torch._subclasses.fake_tensor.log.exception")
    one_norm = mock.patch.object(F, "rms_norm", _layer_norm)
    with logs_nothing, takes_data, one_mode, one_norm, FakeTensorMode(), catch_warnings():
        filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


def low_precision(module: nn.Module, autocast: str | None) -> AbstractContextManager[object]:
    """Return autocast to this element type, if it is given and the module has parameters in float32."""
    if autocast is None or all(one.dtype != torch.float32 for one in module.parameters()):
        return nullcontext()
    return torch.autocast("cpu", dtype=getattr(torch, autocast))


def _layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return F.layer_norm(x, list(shape), weight, eps=eps or 0.0)


def count_operations(module: nn.Module, loss_fn: models.Loss, model: str) -> Operations:
    """Run `loss_fn(module)` and its backward pass once, on any device, and count their operations.

    The pass accumulates gradients in the parameters. `model` is the name in the result. Raises ModelError if a
    parameter gets no gradient, or the loss fails.
    """
    parameters = trainable_parameters(module)
    counter = _Counter()
    seen: list[tuple[tuple[int, ...] | None, int | None]] = []
    with ExitStack() as hooks:
        hooks.enter_context(module.register_forward_pre_hook(lambda _, inputs: seen.append(described_input(inputs))))
        hooks.enter_context(module.register_forward_hook(counter.forward_ended))
        for index, parameter in enumerate(parameters.values()):
            hooks.enter_context(parameter.register_post_accumulate_grad_hook(partial(counter.gradient_ready, index)))
        with counter:
            models.run_batch(model, module, loss_fn)
    if missing := [name for index, name in enumerate(parameters) if index not in counter.ready]:
        raise ModelError(
            f"model {model}: expected the loss to use every parameter, {', '.join(missing[:5])} "
            f"{'and more ' if len(missing) > 5 else ''}got no gradient; freeze those that no batch uses "
            "(requires_grad_(False)), and if other batches use them, as experts, record a trace (ddplab record)"
        )
    shape, tokens = seen[0] if seen else (None, None)
    batch = getattr(loss_fn, "batch", None)
    return _summarize(counter, module, model=model, batch=batch, input_shape=shape, tokens=tokens)


class _Counter(TorchDispatchMode):
    """Lists all operations in order, and how many had run when each pass ended and when each gradient was ready."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.operations: list[Operation] = []
        self.forward_end = sys.maxsize
        self.backward_start: int | None = None
        self.ready: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _is_kernel(func, args, kwargs, result):
            flops, moved = _flops(func, args, kwargs, result), _bytes_moved(func, args, kwargs, result)
            kind, channels_last = _kind(func, args) if flops else ("memory", False)
            self.operations.append(Operation(flops=flops, bytes_moved=moved, kind=kind, channels_last=channels_last))
        return result

    def forward_ended(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self.forward_end = len(self.operations)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _gradient: self._backward_started())

    def gradient_ready(self, index: int, _parameter: Tensor) -> None:
        self._backward_started()
        self.ready.pop(index, None)  # if accumulated twice, the last time counts, also for the ready order
        self.ready[index] = len(self.operations)

    def _backward_started(self) -> None:
        if self.backward_start is None:
            self.backward_start = len(self.operations)


def _summarize(counter: _Counter, module: nn.Module, **about_the_model: Any) -> Operations:
    def operations(start: int, end: int) -> tuple[Operation, ...]:
        return merge(counter.operations[start:end])

    assert counter.backward_start is not None  # there is at least one gradient
    backward_start = counter.backward_start
    forward_end = min(counter.forward_end, backward_start)
    ends = list(counter.ready.values())
    starts = [backward_start, *ends[:-1]]
    parameters = described_parameters(module)
    return Operations(
        **about_the_model,
        torch_version=torch.__version__,
        parameters=parameters,
        buffers=described_buffers(module),
        forward=operations(0, forward_end),
        loss=operations(forward_end, backward_start),
        gradients=tuple(
            GradientOperations(parameter=index, operations=operations(start, end))
            for index, start, end in zip(counter.ready, starts, ends, strict=True)
        ),
        tail=operations(ends[-1], len(counter.operations)),
        step=sgd_step(parameters),
    )


# One operation

_ALLOCATES_ONLY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
_FIRST_IS_NOT_READ = {
    *(aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like),
    *(aten.new_zeros, aten.new_ones, aten.new_full),
    *(aten.zero_, aten.fill_, aten.copy_, aten.normal_, aten.uniform_, aten.bernoulli_),
}
"""Operations whose first argument is overwritten, or used for its shape only."""
_FIRST_IS_READ_IN_PART = {aten.embedding, aten.gather, aten.index, aten.index_select}
"""Operations that read as many bytes of the first argument as the result has."""


def _is_kernel(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """Whether the operation writes anything; views and allocations do not."""
    if func._overloadpacket in _ALLOCATES_ONLY:
        return False
    given = {tensor.untyped_storage()._cdata for tensor in tensors_of((args, kwargs))}
    returned = {tensor.untyped_storage()._cdata for tensor in tensors_of(result)}
    return bool(func._schema.is_mutable or returned - given)


def _kind(func: Any, args: Any) -> tuple[OperationKind, bool]:
    """Return the kind of an operation that computes, and whether it is a convolution of channels-last images."""
    packet = func._overloadpacket
    if packet not in (aten.convolution, aten.convolution_backward):
        return ("attention" if "scaled_dot_product" in func.name() else "matmul"), False
    images, weight = args[:2] if packet == aten.convolution else args[1:3]
    groups = args[-1] if packet == aten.convolution else args[-2]
    layout = torch.channels_last if images.dim() == 4 else torch.channels_last_3d
    channels_last = images.dim() in (4, 5) and not images.is_contiguous()
    channels_last &= images.is_contiguous(memory_format=layout)
    kind: OperationKind = "conv" if groups == 1 else "depthwise" if weight.shape[1] == 1 else "grouped"
    return kind, channels_last


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    if func._overloadpacket == aten.convolution_backward:
        return _convolution_backward_flops(args)
    if func._overloadpacket == aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*_attention_shapes(*args[:3])))
    if func._overloadpacket == aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return int(sdpa_backward_flop_count(list(args[0].shape), *_attention_shapes(*args[1:4])))
    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula else 0


def _convolution_backward_flops(args: tuple[Any, ...]) -> int:
    """Return the FLOPs: as many for each of the two gradients as for the forward pass.

    torch's own formula (2.13) overcounts the gradient of the weight by a factor of `groups`.
    """
    gradient, inputs, weight, *_, transposed, _output_padding, _groups, output_mask = args
    forward = conv_flop_count(list(inputs.shape), list(weight.shape), list(gradient.shape), transposed=transposed)
    return int(forward * sum(output_mask[:2]))


def _attention_shapes(query: Tensor, key: Tensor, value: Tensor) -> list[list[int]]:
    """Return the shapes, with as many heads of keys and values as of queries.

    torch's counter (2.13) has no formula for the fused attention of a processor, which autocast uses. Its other
    formulas refuse grouped queries in older versions.
    """
    return [[one.shape[0], query.shape[1], *one.shape[2:]] for one in (query, key, value)]


def _bytes_moved(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    arguments = func._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    changed = [given.get(one.name) for one in arguments if one.alias_info and one.alias_info.is_write]
    written = _unique([*tensors_of(result), *tensors_of(changed)])
    packet = func._overloadpacket
    if packet in _FIRST_IS_NOT_READ or packet in _FIRST_IS_READ_IN_PART:
        args = args[1:]
    read = _unique(tensors_of((args, kwargs)))
    if packet in _FIRST_IS_READ_IN_PART:
        read += written
    return sum(map(_distinct_bytes, [*read, *written]))


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in a tree of arguments or results; indices and values in place of sparse tensors."""
    found = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found += [leaf._indices(), leaf._values()] if leaf.layout == torch.sparse_coo else [leaf]
    return found


def _unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _distinct_bytes(tensor: Tensor) -> int:
    """Return the bytes in memory; elements of an expanded tensor count once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size if stride or not size else 1 for size, stride in sizes) * tensor.element_size()
