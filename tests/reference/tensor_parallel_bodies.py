"""Rank bodies of test_tensor_parallel.py."""

import functools

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from reference.data_parallel import DistributedDataParallel

from ..scenarios import batch
from .mixed_precision_bodies import Precision

TorchDDP = nn.parallel.DistributedDataParallel


@functools.cache
def mesh_of_two_dimensions() -> DeviceMesh:
    """A mesh of 2 x 2 ranks; made once, because each mesh keeps process groups."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


class Wide(nn.Module):
    """A tensor-parallel pair of layers behind one that every rank holds whole."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.up, self.down = nn.Linear(4, 4), nn.Linear(4, hidden), nn.Linear(hidden, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.first(x).tanh()).tanh())


def sharded(rank: int, _world_size: int, hidden: int, options: dict) -> tuple[list, list, dict[str, object]]:
    """Gradients and shards after each step under both classes, and what our class's state dict holds."""
    mesh = mesh_of_two_dimensions()
    both = []
    for wrap in (DistributedDataParallel, TorchDDP):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        module = parallelize_module(Wide(hidden), mesh["tensor"], plan)
        ddp = wrap(module, device_mesh=mesh["data"], **options)
        if wrap is DistributedDataParallel:
            ours = ddp
        parameters = list(ddp.parameters())  # torch's class has none after its first forward pass
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            ddp(batch(mesh["data"].get_local_rank(), 3, 4, step=step)).square().mean().backward()
            optimizer.step()
            seen.append([p.grad.clone() for p in parameters] + [p.detach().clone() for p in parameters])
        both.append(seen)
    return (*both, {name: tuple(value.shape) for name, value in ours.state_dict().items()})


def refused_shards(rank: int, _world_size: int) -> tuple[str, bool, list, list]:
    """The error of ranks with different caps, whether the module is as before, and gradients of a second attempt."""
    mesh = mesh_of_two_dimensions()
    module = parallelize_module(Wide(4), mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    before = list(map(id, module.parameters()))
    try:
        DistributedDataParallel(module, device_mesh=mesh["data"], bucket_cap_mb=1 + mesh["data"].get_local_rank())
    except RuntimeError as error:
        text = str(error)
    same = before == list(map(id, module.parameters()))
    ddp = DistributedDataParallel(module, device_mesh=mesh["data"])
    ddp(batch(mesh["data"].get_local_rank(), 3, 4)).square().mean().backward()
    got = [p.grad.clone() for p in ddp.parameters()]
    return text, same, got, sharded(rank, 4, 4, {})[0][0][: len(got)]


def sharded_in_low_precision(rank: int, _world_size: int, hidden: int) -> float:
    """Largest relative difference between gradients computed in bfloat16 and in float32."""
    mesh = mesh_of_two_dimensions()
    both = []
    for config in (None, Precision("bfloat16", None).config()):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        module = parallelize_module(Wide(hidden), mesh["tensor"], plan)
        ddp = DistributedDataParallel(module, device_mesh=mesh["data"], mixed_precision=config)
        ddp(batch(mesh["data"].get_local_rank(), 3, 4)).square().mean().backward()
        both.append(torch.cat([p.grad.flatten() for p in ddp.parameters()]))
    return float((both[0] - both[1]).abs().max() / both[0].abs().max())
