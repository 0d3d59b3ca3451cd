"""Data parallelism over tensor parallelism, on a mesh of two dimensions."""

import functools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ddplab.reference.data_parallel import DistributedDataParallel

from ..explore import examples
from ..scenarios import Wrap, assert_same, batch, on_both_classes, trained
from ..strategies import caps_mb
from .mixed_precision_bodies import Precision

modes = st.fixed_dictionaries({"bucket_cap_mb": caps_mb(), "gradient_as_bucket_view": st.booleans()})


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


@examples(5)
@given(st.sampled_from([2, 6, 16]), modes)
def test_a_tensor_parallel_module_trains_as_under_torchs_class(four_ranks, hidden, mode):
    """On a slice of a mesh; torch's class loses its parameters in the first forward pass, ours keeps its shards."""
    for (ours, state), (torchs, _) in four_ranks.run(sharded, hidden, mode):
        assert_same(ours, torchs)
        assert state["module.up.weight"] == (hidden // 2, 4)
        assert state["module.down.weight"] == (4, hidden // 2)
        assert len(state) == 6


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


def test_a_tensor_parallel_module_that_is_refused_stays_as_it_was(four_ranks):
    """Ranks are compared first; only a module that is wrapped loses its DTensors."""
    for error, same, got, expected in four_ranks.run(refused_shards):
        assert "different plans or bucket caps" in error
        assert same
        assert_same(got, expected)


def sharded_in_low_precision(rank: int, _world_size: int, hidden: int) -> float:
    """Largest relative difference between gradients computed in bfloat16 and in float32."""
    both = []
    for config in (None, Precision("bfloat16", None).config()):
        module, mesh, rank_of_data = wide(hidden)
        ddp = DistributedDataParallel(module, device_mesh=mesh, mixed_precision=config)
        (seen,) = trained(ddp, rank_of_data, steps=1)
        both.append(torch.cat([gradient.flatten() for gradient in seen]))
    return float((both[0] - both[1]).abs().max() / both[0].abs().max())


def test_tensor_parallelism_and_mixed_precision_go_together(four_ranks):
    assert max(four_ranks.run(sharded_in_low_precision, 6)) < 0.05
