"""Tensors that stand in place of a module's parameters while its forward pass runs.

Mixed precision computes with low-precision copies of the parameters, tensor parallelism with sharded tensors
(`DTensor`). Both are computed from the parameters by operations that autograd records. So gradients are
accumulated in the parameters themselves, where the reducer finds them, and the optimiser never sees the stand-ins.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo as not_compiled  # see `module_wrapper`
from torch.utils.hooks import RemovableHandle

from ..parameters import Slot, ignored_names, slots

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


def replaced_parameters(module: nn.Module, wrapped: Iterable[Slot], frozen: Iterable[Slot] = ()) -> str | None:
    """An error that names all trainable parameters that were not there when the module was wrapped. None: no such."""
    known = {id(slot.parameter) for slot in (*wrapped, *frozen)}
    ignored = ignored_names(module)
    new = [
        name
        for name, now in module.named_parameters()
        if isinstance(now, nn.Parameter) and now.requires_grad and id(now) not in known and name not in ignored
    ]
    if not new:
        return None  # other tensors are stand-ins, and a parametrization may have moved the parameter
    return (
        f"{', '.join(new)}: other parameters than those that were wrapped. load_state_dict(assign=True) or an "
        "assignment has replaced them, or a parametrization has, and their gradients would not be averaged. "
        "Load without assign=True, or wrap the module afterwards"
    )


def thawed(module: nn.Module, frozen: Iterable[Slot]) -> str:
    """A warning that names parameters that were frozen when the module was wrapped, and are trained now."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    now = dict.fromkeys(names.get(id(slot.parameter), slot.name) for slot in frozen if slot.parameter.requires_grad)
    return (
        f"{', '.join(now)}: frozen when the module was wrapped, trainable now. Their gradients are not averaged, so "
        "the ranks diverge. Unfreeze parameters before wrapping, or wrap the module again"
    )


class ForwardParameters:
    """Puts stand-ins in place of parameters of `module` during every forward pass, and the parameters back after it.

    Every submodule does the same when it runs outside of the whole module's forward pass: activation checkpoints
    run submodules again in the backward pass. What runs again must be a module, or use only parameters of modules
    that it calls. A parameter that several modules share has one stand-in.
    """

    def __init__(self, module: nn.Module, stand_ins: Mapping[nn.Parameter, StandIn]) -> None:
        self._module = module
        self._stand_ins = dict(stand_ins)
        self._slots: dict[nn.Module, list[Slot]] = {part: [] for part in module.modules()}
        for slot in slots(module, self._stand_ins):
            self._slots[slot.module].append(slot)
        self._running: list[nn.Module] = []  # modules that are in their forward passes, the outermost first
        self._handles: list[RemovableHandle] = []
        for part in self._slots:
            whole = part is module
            # Hooks of the user's on the whole module run outside, those on its parts inside: with stand-ins.
            before = part.register_forward_pre_hook(self._before_whole if whole else self._before, prepend=not whole)
            after = part.register_forward_hook(
                self._after_whole if whole else self._after, prepend=whole, always_call=True
            )
            self._handles += [before, after]

    def detach(self) -> None:
        """Remove all hooks: the module computes with its parameters again."""
        self.restore()
        for handle in self._handles:
            handle.remove()

    def restore(self) -> None:
        """Put all parameters back; needed only after a forward pass that was interrupted, as by Ctrl-C."""
        if self._running:
            self._running.clear()
            self._put_back(self._module)

    # Hooks

    @not_compiled
    def _before_whole(self, module: nn.Module, _inputs: Any) -> None:
        self._enter(module)

    @not_compiled
    def _after_whole(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._leave(module)

    def _before(self, part: nn.Module, _inputs: Any) -> None:
        if not torch.compiler.is_compiling():  # a compiled part runs inside the whole module
            self._enter(part)

    def _after(self, part: nn.Module, _inputs: Any, _output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._leave(part)

    def _enter(self, module: nn.Module) -> None:
        if not self._running:
            computed: dict[nn.Parameter, Tensor] = {}
            for owner, name, parameter in self._slots_in(module):
                if parameter not in computed:
                    computed[parameter] = self._stand_ins[parameter](parameter)
                owner._parameters[name] = computed[parameter]  # type: ignore[assignment]  # as functional_call does
        self._running.append(module)

    def _leave(self, module: nn.Module) -> None:
        if not self._running or self._running[-1] is not module:
            return  # an earlier hook raised an error, so this module's forward pass never began
        self._running.pop()
        if not self._running:
            self._put_back(module)

    def _put_back(self, module: nn.Module) -> None:
        for owner, name, parameter in self._slots_in(module):
            setattr(owner, name, parameter)  # recurrent layers then drop their references to the stand-in

    def _slots_in(self, module: nn.Module) -> Iterator[Slot]:
        for part in module.modules():
            yield from self._slots.get(part, ())
