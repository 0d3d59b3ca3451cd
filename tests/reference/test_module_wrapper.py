"""The wrapper: what construction sends, what forward returns, and `no_sync`."""

import warnings

import torch
from torch import nn

from ddplab.reference.data_parallel import DistributedDataParallel


class HasExtraState(nn.Module):
    """Extra state and a non-persistent buffer, both of which a broadcast of the state dict would handle wrongly."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(rank)))
        self.register_buffer("passing", torch.full((2,), float(rank)), persistent=False)

    def get_extra_state(self) -> dict:
        return {"not": "a tensor"}


def values_after_construction(rank: int, _world_size: int) -> list[float]:
    """First elements of the parameter and of the non-persistent buffer."""
    ddp = DistributedDataParallel(HasExtraState(rank + 1), forward_sync_buffers=False)
    return [ddp.module.weight[0].item(), ddp.module.passing[0].item()]


def test_what_the_state_dict_does_not_hold_is_synchronised_too(two_ranks):
    assert two_ranks.run(values_after_construction) == [[1.0, 1.0]] * 2


def gradients_after_a_stray_forward(rank: int, _world_size: int) -> list[float]:
    """A synchronised forward pass without backward, then one under no_sync: nothing is averaged."""
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    ddp(torch.ones(1, 1))
    with ddp.no_sync():
        ddp(torch.full((1, 1), float(rank))).sum().backward()
    return ddp.module.weight.grad.flatten().tolist()


def test_under_no_sync_nothing_is_averaged_even_after_a_stray_forward_pass(two_ranks):
    assert two_ranks.run(gradients_after_a_stray_forward) == [[0.0], [1.0]]


def outputs_of(rank: int, world_size: int) -> bool:
    """Whether forward returns the very object that the module returned."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, *, scale: float) -> dict:
            self.made = {"loss": (self.weight * scale).sum(), "extra": ["text", None]}
            return self.made

    ddp = DistributedDataParallel(Odd())
    return ddp(scale=2.0) is ddp.module.made


def test_forward_returns_what_the_module_returns(two_ranks):
    assert all(two_ranks.run(outputs_of))


def survives_dropping_the_wrapper(rank: int, _world_size: int) -> bool:
    """A module outlives its DDP: it trains alone, and under a new DDP, without the old one's hooks."""
    module = nn.Linear(2, 1)
    ddp = DistributedDataParallel(module)
    del ddp
    module(torch.ones(1, 2) * rank).sum().backward()
    local = module.weight.grad.clone()
    module.zero_grad()
    DistributedDataParallel(module)(torch.ones(1, 2) * rank).sum().backward()
    return bool((local == rank).all())


def test_a_module_outlives_its_wrapper(two_ranks):
    assert all(two_ranks.run(survives_dropping_the_wrapper))


def construct_on_one_rank_only(rank: int, _world_size: int) -> list[float] | None:
    if rank == 0:
        return None
    module = HasExtraState(rank)
    DistributedDataParallel(module, init_sync=False)
    return module.weight.tolist()


def test_without_init_sync_nothing_is_communicated(two_ranks):
    """Rank 1 constructs alone; its parameters stay its own."""
    assert two_ranks.run(construct_on_one_rank_only) == [None, [1.0, 1.0]]


def second_derivatives(rank: int, _world_size: int) -> tuple[bool, bool]:
    """d/dw of (w x)^2 is 2 w x^2, averaged; its derivative by w is this rank's 2 x^2."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    ddp = DistributedDataParallel(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddp(torch.tensor([[1.0 + rank]])).square().sum().backward(create_graph=True)
    gradient = module.weight.grad
    module.weight.grad = None
    (second,) = torch.autograd.grad(gradient.sum(), module.weight)
    return gradient.item() == (2 * 1 + 2 * 4) / 2, second.item() == 2 * (1 + rank) ** 2


def test_with_create_graph_the_gradient_is_averaged_and_its_derivative_is_local(two_ranks):
    for averaged, local in two_ranks.run(second_derivatives):
        assert averaged
        assert local
