"""Tensors that stand in place of a module's parameters while it computes.

Mixed precision computes with low-precision copies of the parameters, tensor parallelism with sharded tensors
(`DTensor`). Both are computed from the parameters by operations that autograd records. So gradients are
accumulated in the parameters themselves, where the reducer finds them, and the optimiser never sees the stand-ins.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo as not_compiled  # see `module_wrapper`

from ..autograd_hooks import PassEnd
from ..parameters import slots

StandIn = Callable[[Tensor], Tensor]
"""Computes the tensor that stands in place of a parameter."""


def compose(
    first: Mapping[nn.Parameter, StandIn], then: Mapping[nn.Parameter, StandIn]
) -> dict[nn.Parameter, StandIn]:
    """Stand-ins for all parameters of either; where both have one, `then` gets the result of `first`."""
    both = {parameter: partial(_both, first[parameter], then[parameter]) for parameter in first if parameter in then}
    return {**first, **then} | both


def _both(first: StandIn, then: StandIn, parameter: Tensor) -> Tensor:
    return then(first(parameter))


class ForwardParameters:
    """Puts stand-ins in place of parameters of `module` while it computes, and the parameters back afterwards.

    It computes in the wrapper's forward pass, and once more in the backward pass if activation checkpoints run parts
    of it again. Between passes the script finds the parameters, also for `ddp.module(x)` and copies of the module. A
    parameter that several modules share has one stand-in.

    `always`: also in forward passes of the module itself, which cannot do without.
    """

    def __init__(self, module: nn.Module, stand_ins: Mapping[nn.Parameter, StandIn], *, always: bool) -> None:
        self._stand_ins = dict(stand_ins)
        self._slots = slots(module, self._stand_ins)
        self._last: dict[nn.Parameter, Tensor] = {}  # those of a forward pass whose backward pass has not ended
        self.depth = 0  # forward and backward passes that use stand-ins now, one inside the other
        self._task = -1  # the backward pass among them
        if always:
            module.register_forward_pre_hook(self.enter)
            module.register_forward_hook(self.leave, prepend=True, always_call=True)

    @not_compiled
    def enter(self, *_: Any) -> None:
        """Before a forward pass; a hook of the module too."""
        if not self.depth:
            self._put_in_place(self._compute())
        self.depth += 1

    @not_compiled
    def leave(self, *_: Any) -> None:
        """After a forward or backward pass; a hook of the module too."""
        self.return_to(self.depth - 1)

    def return_to(self, depth: int) -> None:
        """After a pass, or one that was interrupted: `depth` passes go on; without any, the parameters return."""
        self.depth = max(0, depth)  # below: a hook of the module raised an error before `enter`
        if self.depth:
            return
        self._task = -1
        for owner, name, parameter in self._slots:
            owner._parameters[name] = parameter
            if isinstance(owner, nn.RNNBase):
                setattr(owner, name, parameter)  # it then drops its reference to the stand-in

    def backward_starts(self) -> None:
        """Checkpoints may run parts of the module again until the backward pass ends."""
        if self._task == (task := torch._C._current_graph_task_id()):
            return
        if not self.depth:
            with torch.enable_grad():
                self._put_in_place(self._last or self._compute())
        self.depth += 1
        self._task = task
        end = PassEnd(task, self._backward_ends, self._backward_ends)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _backward_ends(self, task: int) -> None:
        if task == self._task:
            self._last = {}
            self._task = -1
            self.leave()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": {}}  # tensors within a graph can be neither copied nor pickled

    def _compute(self) -> dict[nn.Parameter, Tensor]:
        computed = {parameter: stand_in(parameter) for parameter, stand_in in self._stand_ins.items()}
        self._last = computed if torch.is_grad_enabled() else {}
        return computed

    def _put_in_place(self, computed: Mapping[nn.Parameter, Tensor]) -> None:
        for owner, name, parameter in self._slots:
            owner._parameters[name] = computed[parameter]  # type: ignore[assignment]  # as functional_call does
