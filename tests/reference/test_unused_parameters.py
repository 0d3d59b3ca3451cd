"""Unused parameters: gradients that stay None, and static graphs."""

import copy

import pytest
import torch
from torch import Tensor, nn

from ddplab.reference.data_parallel import DistributedDataParallel

from ..scenarios import Outputs, Wrap, on_both_classes


class TwoWeights(nn.Module):
    """Returns a factor times one of its weights, so the factor is the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(1) for _ in range(2))

    def forward(self, factor: float, index: int) -> Tensor:
        return self.weights[index] * factor


def drop_accumulated_gradients(rank: int, _world_size: int) -> list[str]:
    """Rank 1's second parameter is used under no_sync only, and its gradient is dropped."""
    ddp = DistributedDataParallel(TwoWeights(), find_unused_parameters=True)
    with ddp.no_sync():
        ddp(4.0 * (1 + rank), 1).backward()
    ddp.zero_grad()
    ddp(4.0 * (1 + rank), 0).backward()
    return ["None" if p.grad is None else f"{p.grad.item():.1f}" for p in ddp.parameters()]


def test_gradients_dropped_after_no_sync_count_as_unused(two_ranks):
    """Torch raises an internal error; here the averages are over what is there, and None stays None."""
    assert two_ranks.run(drop_accumulated_gradients) == [["6.0", "None"]] * 2


class Returns(nn.Module):
    """Returns its output in a structure."""

    def __init__(self, structure: str) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.structure = structure

    def forward(self, x: Tensor) -> object:
        output = self.layer(x)
        return {
            "tensor": output,
            "dataclass": Outputs(output, 0),
            "set": {output},
            "iterator": iter([output]),
        }[self.structure]


@on_both_classes
def static_graph_behind(wrap: Wrap, rank: int, structure: str, copied: bool) -> list[float]:
    """Gradients of the weight by iteration, locally 1 and 2; perhaps of a deep copy at last."""
    ddp = wrap(Returns(structure), static_graph=True)
    runs = []
    for number in range(6):
        if copied and number == 3:
            ddp = copy.deepcopy(ddp)
        ddp.zero_grad()
        output = ddp(torch.full((1, 1), 1.0 + rank))
        if structure == "dataclass":
            output = output.used
        elif structure != "tensor":
            (output,) = output
        output.sum().backward()
        runs.append(ddp.module.layer.weight.grad.item())
    return runs


@pytest.mark.parametrize("structure", ["dataclass", "set", "iterator"])
def test_a_static_graph_behind_any_structure_is_averaged(two_ranks, structure):
    """Torch's sink has nothing to pass on, so the gradients stay local."""
    for rank, (ours, torchs) in enumerate(two_ranks.run(static_graph_behind, structure, False)):
        assert ours == [1.5] * 6
        assert torchs == [1.0 + rank] * 6


def test_a_deep_copy_of_a_trained_static_graph_is_averaged(two_ranks):
    """Torch's copy takes the first iteration for done, so its gradients stay local."""
    for rank, (ours, torchs) in enumerate(two_ranks.run(static_graph_behind, "tensor", True)):
        assert ours == [1.5] * 6
        assert torchs == [1.5] * 3 + [1.0 + rank] * 3
