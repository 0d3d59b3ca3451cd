"""Counts the bytes that a step of a model holds on a GPU, without a GPU and without allocating them.

A dispatch mode follows every storage that an operation makes, from its creation to its end, through one forward and
one backward pass on fake tensors, whose lives are those of real ones. Two things that CUDA does otherwise than a
processor are added: see `_OnCuda` and `FLOAT32_ATTENTION_OUTPUTS`.
"""

import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as torch names it
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import models
from .operation_counter import low_precision, tensors_of, without_data
from .reference.errors import ModelError
from .reference.parameters import trainable_parameters
from .reference.trace import StepMemory

aten = torch.ops.aten
FLOAT32_ATTENTION_OUTPUTS = 2
"""Bytes that fused attention in float32 keeps on a GPU, as multiples of its output: measured on one H100 with torch
2.11, one output more for each layer of ViT-B/16, BERT-Large and GPT-2 than on a processor; in bfloat16 none."""
IN_FLOAT32 = {
    *(F.softmax, F.log_softmax, F.layer_norm, F.group_norm),
    *(torch.softmax, torch.log_softmax, Tensor.softmax, Tensor.log_softmax),
}
"""Functions that autocast runs in float32 on CUDA, and in low precision on a processor."""


def measure_memory(model: str, *, autocast: str | None = None) -> StepMemory | None:
    """Count what one step of a model holds; None: it does not run on fake tensors.

    Arguments are those of `measure_operations`. Where the batch is not known, it counts as one sample. A callable
    that takes `batch` is counted with its own batch and with twice as many samples, to see what does not grow.
    Raises ModelError if there is no such model.
    """
    try:
        held = _held(model, autocast, None)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        return None
    if "batch" not in signature(models.resolve(model)).parameters:
        return held
    with models.users_code(model, models.resolve(model), f"it to run with batch={2 * held.batch} too"):
        twice = _held(model, autocast, 2 * held.batch)
    if twice == held.model_copy(update={"batch": 2 * held.batch}):
        raise ModelError(
            f"model {model}: expected more memory with batch={2 * held.batch} than with {held.batch}, got as much; "
            "make that many samples in the callable, or leave `batch` out of its arguments"
        )
    return held.model_copy(update={"constant_bytes": max(0, 2 * held.kept_bytes - twice.kept_bytes)})


def _held(model: str, autocast: str | None, batch: int | None) -> StepMemory:
    with without_data():
        module, loss_fn = models.build(model, batch)
        with low_precision(module, autocast), _OnCuda():
            return held_by_a_step(module, loss_fn, batch or models.batch_of(model, loss_fn) or 1)


def held_by_a_step(module: nn.Module, loss_fn: models.Loss, batch: int = 1) -> StepMemory:
    """Run `loss_fn(module)`, on so many samples, and its backward pass once, on any device; follow what they hold."""
    live = LiveBytes(tensors_of([*module.parameters(), *module.buffers()]))
    parameters = trainable_parameters(module)
    ready = [0] * len(parameters)

    def gradient_ready(index: int, parameter: Tensor) -> None:
        live.gradient(parameter)
        ready[index] = live.bytes - live.gradient_bytes

    with ExitStack() as hooks:
        for index, parameter in enumerate(parameters.values()):
            hooks.enter_context(parameter.register_post_accumulate_grad_hook(partial(gradient_ready, index)))
        hooks.enter_context(live)
        loss = loss_fn(module)
        kept = live.bytes
        torch.clear_autocast_cache()  # scripts leave autocast before the backward pass
        loss.backward()
    return StepMemory(
        batch=batch,
        batch_bytes=live.given_bytes,
        frozen_bytes=sum(one.nbytes for one in module.parameters() if not one.requires_grad),
        kept_bytes=kept,
        peak_bytes=live.peak,
        peak_with_gradients_bytes=live.peak_with_gradients,
        ready_bytes=tuple(ready),
    )


class _OnCuda(TorchFunctionMode):
    """Casts to float32 what CUDA's autocast casts: of a cross entropy, not the logarithm but what is made of it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs or {})
        if func is F.cross_entropy and not args[1].is_floating_point():
            return F.nll_loss(F.log_softmax(args[0], 1).float(), args[1])
        if func in IN_FLOAT32:
            args = (args[0].float(), *args[1:])
        return func(*args, **kwargs or {})


class LiveBytes(TorchDispatchMode):
    """Follows storages: those that operations make, and those that they are given beside `known`."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.bytes = self.gradient_bytes = self.given_bytes = self.peak = self.peak_with_gradients = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}
        self._gradients: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in tensors_of((args, kwargs)):
            self.given_bytes += self._follow(tensor, 0)
        result = func(*args, **kwargs or {})
        is_attention = func._overloadpacket == aten._scaled_dot_product_flash_attention_for_cpu
        for tensor in tensors_of(result):
            twice = is_attention and tensor is result[0] and tensor.dtype == torch.float32
            self._follow(tensor, FLOAT32_ATTENTION_OUTPUTS if twice else 1)
        self.peak_with_gradients = max(self.peak_with_gradients, self.bytes)
        self.peak = max(self.peak, self.bytes - self.gradient_bytes)
        return result

    def gradient(self, parameter: Tensor) -> None:
        """The gradient of a parameter is complete."""
        assert parameter.grad is not None
        for tensor in tensors_of(parameter.grad):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._gradients:
                self._gradients.add(storage._cdata)
                self.gradient_bytes += storage.nbytes()

    def _follow(self, tensor: Tensor, times: int) -> int:
        """Count a storage that is seen for the first time, `times` its bytes; return these, 0 for other storages."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen:
            return 0
        self._seen.add(storage._cdata)
        made_bytes = times * storage.nbytes()
        weakref.finalize(storage, self._ended, storage._cdata, made_bytes)
        self.bytes += made_bytes  # nothing is called between reading and writing: `_ended` runs in any thread
        return storage.nbytes()

    def _ended(self, storage: int, made_bytes: int) -> None:
        self._seen.discard(storage)
        self.bytes -= made_bytes
