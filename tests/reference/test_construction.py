"""Checks at construction: how ranks compare their set-ups."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddplab.reference.checks.construction import check_module, exchange_device
from ddplab.reference.data_parallel import DistributedDataParallel
from ddplab.reference.errors import CollectiveError
from ddplab.reference.parameters import trainable_parameters


@pytest.mark.parametrize(
    ("backends", "module", "expected"),
    [
        (["cpu"], nn.Linear(1, 1), "cpu"),
        (["cuda", "cpu"], SimpleNamespace(parameters=list, buffers=list), "cpu"),
        (["meta"], nn.Linear(1, 1, device="meta"), "meta"),
        (["meta"], nn.BatchNorm1d(1, affine=False, device="meta"), "meta"),
        (["cuda"], nn.ReLU(), "cuda"),
        ([], nn.Linear(1, 1, device="meta"), "meta"),
        ([], nn.ReLU(), "cpu"),
    ],
)
def test_setups_are_compared_on_a_device_that_the_group_has_a_backend_for(backends, module, expected):
    group = SimpleNamespace(_device_types=[torch.device(name) for name in backends], bound_device_id=None)
    assert exchange_device(module, group) == torch.device(expected)


def test_setups_are_compared_on_the_modules_gpu_and_not_on_the_current_one():
    """With `device_ids=[rank]` and without `set_device`, the current device is GPU 0 on every rank."""
    group = SimpleNamespace(_device_types=[torch.device("cuda")], bound_device_id=torch.device("cuda", 3))
    on_gpu_1 = SimpleNamespace(device=torch.device("cuda", 1))
    on_cpu = SimpleNamespace(device=torch.device("cpu"))
    module = SimpleNamespace(parameters=lambda: [on_cpu, on_gpu_1], buffers=list)
    assert exchange_device(module, group) == torch.device("cuda", 1)
    assert exchange_device(nn.ReLU(), group) == torch.device("cuda", 3)


def one_rank_does_not_compare(rank: int, _world_size: int) -> str:
    """Rank 1 is given `init_sync=False` and waits until rank 0 has given up."""
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    error = ""
    try:
        DistributedDataParallel(nn.Linear(1, 1), process_group=group, init_sync=rank == 0)
    except CollectiveError as raised:
        error = str(raised)
    dist.barrier()
    return error


def test_a_rank_that_does_not_compare_setups_is_an_error_that_names_init_sync(two_ranks):
    waiting, other = two_ranks.run(one_rank_does_not_compare)
    assert waiting.startswith("rank 0: expected every rank to construct the wrapper with init_sync=True")
    assert not other


@pytest.mark.parametrize("made", ["in inference mode", "by an operation"])
def test_a_parameter_whose_gradient_autograd_does_not_accumulate_is_named(made):
    """In inference mode, torch's class raises in the first backward pass; ours raised AttributeError."""
    with torch.inference_mode(mode=made == "in inference mode"):
        module = nn.Sequential(nn.Linear(2, 2))
    if made == "by an operation":
        module[0]._parameters["weight"] = module[0].weight * 2
    with pytest.raises(TypeError, match=r"expected a leaf of autograd's graph, .*got 0\.weight of Sequential\. Make"):
        check_module(module, trainable_parameters(module))
