"""Data parallelism over tensor parallelism: a module whose parameters are sharded over another dimension of the mesh.

`torch.distributed.tensor.parallel.parallelize_module` replaces parameters by DTensors. The data-parallel module
trains their local shards: it replaces each DTensor by its shard for good, and forward computes with a DTensor made
from the shard. Gradients, buckets, optimisers and the state dict are those of the shards.
"""

from functools import partial

from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .forward_parameters import StandIn


def is_slice(mesh: DeviceMesh | None) -> bool:
    """Whether `mesh` is one dimension of a larger mesh; other dimensions may then shard the module."""
    return mesh is not None and mesh._get_root_mesh() != mesh


def localize(module: nn.Module) -> dict[nn.Parameter, StandIn]:
    """Replace every DTensor among the parameters by its local shard, for good.

    Returns:
        For each shard the function that computes its DTensor.
    """
    stand_ins: dict[nn.Parameter, StandIn] = {}
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
                stand_ins[shard] = partial(_sharded, parameter._spec)
            part._parameters[name] = shards[parameter]
    return stand_ins


def _complete(gradient: Tensor) -> Tensor:
    """Wait for the tensor-parallel collective that a gradient is the result of, if there is one."""
    return gradient.wait() if isinstance(gradient, AsyncCollectiveTensor) else gradient


def _sharded(spec: DTensorSpec, shard: Tensor) -> Tensor:
    sharded: Tensor = DTensor.from_local(
        shard, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
    )
    return sharded
