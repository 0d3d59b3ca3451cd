"""The forward pass of a data-parallel module, and the contexts that change how its gradients are averaged.

`data_parallel` constructs the module, `reducer` executes its backward pass, and the optimiser step needs no code.
`minimal` has simpler classes of the same kind.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo as not_compiled  # unlike torch.compiler.disable, loads no compiler yet
from torch.distributed.algorithms.join import Join
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from .autograd_hooks import call_at_backward, outside_of_transforms, tensors_in, transforms_active
from .broadcast import send_buffers_if_due
from .features.backward_sink import through_sink
from .features.join import JoinableModule, ranks_present
from .features.parameter_stand_ins import ForwardParameters
from .parameters import Registrations, Slot, check_registered, warn_of_thawed


class DataParallel(JoinableModule, nn.Module):
    """Wraps a module so that its gradients are averaged over all ranks while the backward pass runs.

    Forward returns what the module returns; after each backward pass every rank holds the same averaged gradients.
    `data_parallel.DistributedDataParallel` constructs it. Scripts subclass that class, and pass attributes that it
    lacks through to the module, so each further name here might hide one of theirs.
    """

    _trained_slots: list[Slot]  #: the places of the trainable parameters when the module was wrapped
    _frozen_slots: list[Slot]  #: those of the others, until one of them has become trainable
    _added_slots: list[Slot]  #: those of trainable parameters that were added later
    _registrations: int  #: value of `Registrations.count` when the module was last looked at
    device_ids: list[int] | None
    mixed_precision: Any
    _forward_parameters: ForwardParameters | None
    """Puts other tensors in place of parameters during forward passes. None: forward uses them."""
    _ddp_sink_clone: bool
    _lazy_init_ran = False
    _lazy_init: Callable[[], None]
    _inside_ddp_forward: Any = TorchDDP._inside_ddp_forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's inputs and return its output."""
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            depth = self._forward_parameters.depth if self._forward_parameters is not None else 0
            try:
                inputs, kwargs = self._pre_forward(*inputs, **kwargs)
                output = self._run_ddp_forward(*inputs, **kwargs)
            except BaseException:  # Ctrl-C too
                if self._forward_parameters is not None:
                    self._forward_parameters.return_to(depth)
                raise
            return self._post_forward(output)

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._inside_ddp_forward():  # torch.compile splits its graph at buckets
            return self.module(*inputs, **kwargs)

    @not_compiled
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        reducer = self._reducer
        with_gradients, joining = torch.is_grad_enabled(), self._join_config.enable
        if with_gradients:
            self._check_parameters()
            reducer.prepare_for_forward(synchronized=self.require_backward_grad_sync)
        presence = Join.notify_join_context(self)
        if presence is not None and not self._divide_by_initial_world_size:
            reducer.count_ranks = partial(ranks_present, presence)
        # Under Join, a rank without inputs cannot know whether the other ranks have gradients enabled.
        if with_gradients or joining:
            reducer.rebuild_if_due()
        if self._has_buffers:
            send_buffers_if_due(self, after_forward=False)
        if joining:
            self._check_global_requires_backward_grad_sync(is_joined_rank=False)
        if not self._lazy_init_ran:
            self._lazy_init()
        if self.device_ids:
            gpu = torch.device(self.device.type, self.device_ids[0])
            (inputs,), (kwargs,) = _to_kwargs(inputs, kwargs, gpu, use_side_stream_for_tensor_copies=True)
        if self.mixed_precision is not None:
            inputs, kwargs = _cast_forward_inputs(self.mixed_precision.param_dtype, *inputs, **kwargs)
        if self._forward_parameters is not None:
            self._forward_parameters.enter()
        return inputs, kwargs

    def _check_parameters(self) -> None:
        """Raise RuntimeError if parameters have been replaced since the module was wrapped; warn of further ones."""
        module, name, first = self._trained_slots[0]
        # A conversion may have replaced all parameters without registering them.
        if self._registrations != Registrations.count or getattr(module, name, None) is not first:
            check_registered(self)
        if any(slot.parameter.requires_grad for slot in self._frozen_slots):
            warn_of_thawed(self)

    @not_compiled
    def _post_forward(self, output: Any) -> Any:
        reducer = self._reducer
        if self._forward_parameters is not None:
            self._forward_parameters.leave()
        if self._has_buffers:
            send_buffers_if_due(self, after_forward=True)
        averaging = torch.is_grad_enabled() and self.require_backward_grad_sync
        # As in torch: buffers are sent again only after a forward pass whose gradients are averaged.
        self.require_forward_param_sync = averaging
        if averaging:
            outputs = [outside_of_transforms(tensor) for tensor in tensors_in(output)]
            reducer.prepare_for_backward(outputs)
            if reducer.tracker.needs_sink and not transforms_active():
                output = through_sink(output, reducer.backward_starts, clone=self._ddp_sink_clone)
            else:
                call_at_backward(outputs, reducer.backward_starts)
        elif torch.is_grad_enabled():
            reducer.watch_gradients(synchronized=False)
        if self._forward_parameters is not None and torch.is_grad_enabled():
            call_at_backward(tensors_in(output), self._forward_parameters.backward_starts)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: passes inside the context average nothing.

        The first synchronised backward pass afterwards averages the accumulated gradients.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


def sync_enabled(ddp: "weakref.ref[Any]") -> bool:
    """Whether a module averages now: it is outside of `no_sync()`, or gone, as `DDP(module)(x)` is in backward."""
    return (alive := ddp()) is None or alive.require_backward_grad_sync
