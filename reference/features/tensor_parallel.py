"""Data parallelism over tensor parallelism: a module whose parameters are sharded over another dimension of the mesh.

`torch.distributed.tensor.parallel.parallelize_module` replaces parameters by DTensors. The data-parallel module
trains their local shards: it replaces each DTensor by its shard for good, and forward computes with a DTensor made
from the shard. Gradients, buckets, optimisers and the state dict are those of the shards.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

from ..parameters import slots
from .parameter_stand_ins import StandIn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_slice(mesh: DeviceMesh | None) -> bool:
    """Whether `mesh` is one dimension of a larger mesh; other dimensions may then shard the module."""
    return mesh is not None and mesh._get_root_mesh() != mesh


def localize(module: nn.Module) -> "dict[nn.Parameter, DTensor]":
    """Replace every DTensor among the parameters by its local shard; returns the DTensor of each shard."""
    from torch.distributed.tensor import DTensor  # takes a second, and most modules have none

    shards: dict[nn.Parameter, nn.Parameter] = {}  # by DTensor, which several modules may share
    for part in list(module.modules()):
        for name, parameter in list(part._parameters.items()):
            if not isinstance(parameter, DTensor):
                continue
            if parameter not in shards:
                shard = nn.Parameter(parameter._local_tensor.detach(), requires_grad=parameter.requires_grad)
                if shard.requires_grad:
                    shard.register_hook(_complete)
                shards[parameter] = shard
            part._parameters[name] = shards[parameter]
    return {shard: parameter for parameter, shard in shards.items()}  # type: ignore[misc]  # a DTensor too


def put_back(module: nn.Module, shards: "Mapping[nn.Parameter, DTensor]") -> None:
    """Undo `localize`."""
    for part, name, shard in slots(module, shards):
        part._parameters[name] = shards[shard]  # type: ignore[assignment]  # a parameter too


def stand_ins(shards: "Mapping[nn.Parameter, DTensor]") -> dict[nn.Parameter, StandIn]:
    """For each shard the function that computes its DTensor."""
    return {
        shard: partial(one.from_local, device_mesh=one.device_mesh, placements=one.placements, run_check=False,
                       shape=one.shape, stride=one.stride())
        for shard, one in shards.items()
    }  # fmt: skip


def _complete(gradient: Tensor) -> Tensor:
    """Wait for the tensor-parallel collective that a gradient is the result of, if there is one."""
    return gradient.wait() if isinstance(gradient, AsyncCollectiveTensor) else gradient
