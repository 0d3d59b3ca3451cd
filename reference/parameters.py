"""A module's synchronised parameters and buffers, in the order of the parameter index, and later changes."""

import warnings
from collections.abc import Iterable
from traceback import walk_stack
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils import stateless

if TYPE_CHECKING:
    from .module_wrapper import DataParallel

INTEGERS = {4: torch.int32, 8: torch.int64}
"""Element types of integers, by their size in bytes."""


class Slot(NamedTuple):
    """A parameter under one of its names in one module."""

    module: nn.Module
    name: str
    parameter: nn.Parameter


def slots(module: nn.Module, parameters: Iterable[nn.Parameter]) -> list[Slot]:
    """All slots of `module` that hold one of `parameters`."""
    wanted = set(parameters)
    return [
        Slot(part, name, parameter)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None and parameter in wanted
    ]


class ModuleTensors:
    """The tensors of a module that ranks synchronise, by name, as of the moment when the module is wrapped.

    `parameters` are trainable or not, `sparse` names those whose gradients are sparse tensors, `bucketed` are those
    that are not `delayed` (see `delayed_all_reduce`); `slots` are places of trainable ones, `frozen` of others.
    """

    def __init__(self, module: nn.Module, delayed: dict[str, nn.Parameter]) -> None:
        self.trainable = trainable_parameters(module)
        self.bucketed = {name: parameter for name, parameter in self.trainable.items() if name not in delayed}
        self.sparse = sparse_parameters(module)
        self.parameters = synchronized_parameters(module)
        self.buffers = synchronized_buffers(module)
        self.slots = slots(module, self.trainable.values())
        self.frozen = [Slot(module, name, one) for name, one in self.parameters.items() if not one.requires_grad]


def ignored_names(module: nn.Module) -> frozenset[str]:
    """Names of the parameters and buffers that are not synchronised (torch's `_ddp_params_and_buffers_to_ignore`)."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, in registration order; a shared parameter counts once, under its first name."""
    ignored = ignored_names(module)
    found: dict[nn.Parameter, str] = {}
    for name, parameter in nn.Module.named_parameters(module, remove_duplicate=False):
        if parameter.requires_grad and name not in ignored:
            found.setdefault(parameter, name)
    return {name: parameter for parameter, name in found.items()}


def synchronized_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters, trainable or not, by name, except the ignored ones."""
    ignored = ignored_names(module)
    return {name: parameter for name, parameter in module.named_parameters() if name not in ignored}


def synchronized_buffers(module: nn.Module) -> dict[str, Tensor]:
    """All buffers by name, except the ignored ones."""
    ignored = ignored_names(module)
    return {name: buffer for name, buffer in module.named_buffers() if name not in ignored}


def sparse_parameters(module: nn.Module) -> set[str]:
    """Names of the trainable parameters whose gradients are sparse tensors."""
    embeddings = (part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag))
    sparse = {id(embedding.weight) for embedding in embeddings if embedding.sparse}
    return {name for name, parameter in trainable_parameters(module).items() if id(parameter) in sparse}


def dtype_name(tensor: Tensor) -> str:
    """Name of the element type as in traces, for example "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def dense_strides(tensor: Tensor) -> list[int]:
    """Strides of the dimensions that have more than one element; the other strides have no meaning."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def bucket_key(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    """Key of a tensor: tensors in one bucket have the same dtype and device."""
    return tensor.dtype, tensor.device


def reachable(outputs: Iterable[Tensor], indices: dict[Node, int]) -> frozenset[int]:
    """Indices of the parameters that a backward pass from `outputs` can reach; `indices` are by accumulating node."""
    seen: set[Node] = set()
    pending = [get_gradient_edge(output).node for output in outputs if output.requires_grad]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        pending.extend(following for following, _ in node.next_functions if following is not None)
    return frozenset(indices[node] for node in seen & indices.keys())


# Parameters that are not those that were wrapped


class Registrations:
    """How many modules and parameters modules have registered in this process; when it grows, a layer may be new."""

    count = 0

    @classmethod
    def grow(cls, *_registered: object) -> None:
        """A hook of torch's, which calls it for every module and parameter."""
        cls.count += 1


nn.modules.module.register_module_module_registration_hook(Registrations.grow)
nn.modules.module.register_module_parameter_registration_hook(Registrations.grow)


def check_registered(ddp: "DataParallel") -> None:
    """Raise RuntimeError if parameters of the wrapped module have been replaced; watch further ones, in it or beside.

    `functional_call` replaces parameters for the time of a call, which is no mistake.
    """
    rank, slots, frozen = ddp.process_group.rank(), ddp._trained_slots, ddp._frozen_slots
    new = new_parameters(ddp, [*slots, *frozen, *ddp._added_slots])
    if new and any(frame.f_code is stateless._functional_call.__code__ for frame, _ in walk_stack(None)):
        return
    trainable = [slot for slot in new if slot.parameter.requires_grad]
    names = ", ".join(slot.name for slot in trainable)
    if trainable and not {slot.parameter for slot in slots} <= set(ddp.parameters()):
        ddp._reducer.fail(
            f"rank {rank}: {names}: other parameters than those that were wrapped. A new layer, an assignment, a "
            "conversion, a parametrization or load_state_dict(assign=True) has replaced them, so their gradients "
            "would not be averaged. Load without assign=True, change layers before wrapping, or wrap the module again"
        )
    ddp._registrations = Registrations.count
    ddp._added_slots += trainable
    frozen += [slot for slot in new if not slot.parameter.requires_grad]

    def warn(_parameter: Tensor) -> None:
        for handle in handles:
            handle.remove()
        warnings.warn(
            f"rank {rank}: {names}: added after the module was wrapped. Their gradients are not averaged, so the "
            "ranks diverge. Add layers before wrapping, or wrap the module again",
            stacklevel=2,
        )

    # At the first gradient: parameters that never get one, such as a teacher's, are no mistake.
    handles = [slot.parameter.register_post_accumulate_grad_hook(warn) for slot in trainable]


def warn_of_thawed(ddp: "DataParallel") -> None:
    """Warn once that frozen parameters have become trainable."""
    thawed = ", ".join(slot.name for slot in ddp._frozen_slots if slot.parameter.requires_grad)
    warnings.warn(
        f"rank {ddp.process_group.rank()}: {thawed}: frozen when the module was wrapped, trainable now. Their "
        "gradients are not averaged, so the ranks diverge. Unfreeze parameters before wrapping, or wrap again",
        stacklevel=5,
    )
    ddp._frozen_slots[:] = [slot for slot in ddp._frozen_slots if not slot.parameter.requires_grad]


def new_parameters(ddp: nn.Module, known: Iterable[Slot]) -> list[Slot]:
    """Parameters of a wrapper, by their names in its module, in none of the `known` slots and in no other wrapper."""
    others = (part for part in ddp.modules() if isinstance(part, TorchDDP) and part is not ddp)
    ids = {id(slot.parameter) for slot in known} | {id(one) for other in others for one in other.parameters()}
    ignored = ignored_names(ddp.get_submodule("module"))
    return [
        Slot(ddp, name.removeprefix("module."), now)
        for name, now in ddp.named_parameters()
        # Other tensors are stand-ins.
        if isinstance(now, nn.Parameter) and id(now) not in ids and name.removeprefix("module.") not in ignored
    ]
