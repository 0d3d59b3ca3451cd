"""Rank bodies of test_tensor_parallel.py."""

import functools

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from reference.data_parallel import DistributedDataParallel

from ..scenarios import Wrap, batch, on_both_classes, trained
from .mixed_precision_bodies import Precision


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


def wide(hidden: int) -> tuple[nn.Module, DeviceMesh, int]:
    """A module that is split over one dimension of the mesh, the other dimension, and the rank in it."""
    mesh = mesh_of_two_dimensions()
    module = parallelize_module(Wide(hidden), mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return module, mesh["data"], mesh["data"].get_local_rank()


@on_both_classes
def sharded(wrap: Wrap, _rank: int, hidden: int, options: dict) -> tuple[list, dict[str, object]]:
    """Gradients and shards after each step, and what the state dict holds."""
    module, mesh, rank = wide(hidden)
    ddp = wrap(module, device_mesh=mesh, **options)
    parameters = list(ddp.parameters())  # torch's class has none after its first forward pass
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        ddp(batch(rank, 3, 4, step=step)).square().mean().backward()
        optimizer.step()
        seen.append([p.grad.clone() for p in parameters] + [p.detach().clone() for p in parameters])
    return seen, {name: tuple(value.shape) for name, value in ddp.state_dict().items()}


def refused_shards(rank: int, _world_size: int) -> tuple[str, bool, list, list]:
    """The error of ranks with different caps, whether the module is as before, and gradients of a second attempt."""
    module, mesh, rank_of_data = wide(4)
    before = list(map(id, module.parameters()))
    try:
        DistributedDataParallel(module, device_mesh=mesh, bucket_cap_mb=1 + rank_of_data)
    except RuntimeError as error:
        text = str(error)
    same = before == list(map(id, module.parameters()))
    (got,) = trained(DistributedDataParallel(module, device_mesh=mesh), rank_of_data, steps=1)
    (steps, _), _ = sharded(rank, 4, 4, {})
    return text, same, got, steps[0][: len(got)]


def sharded_in_low_precision(rank: int, _world_size: int, hidden: int) -> float:
    """Largest relative difference between gradients computed in bfloat16 and in float32."""
    both = []
    for config in (None, Precision("bfloat16", None).config()):
        module, mesh, rank_of_data = wide(hidden)
        ddp = DistributedDataParallel(module, device_mesh=mesh, mixed_precision=config)
        (seen,) = trained(ddp, rank_of_data, steps=1)
        both.append(torch.cat([gradient.flatten() for gradient in seen]))
    return float((both[0] - both[1]).abs().max() / both[0].abs().max())
