"""Kinds of buckets: those whose views are the gradients, and those of sparse gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddplab.reference.bucket_memory import CACHE_LINE_BYTES
from ddplab.reference.buckets import MOST_WAITING_BYTES
from ddplab.reference.data_parallel import DistributedDataParallel
from ddplab.reference.features.view_and_sparse_buckets import ViewBucket

from ..scenarios import Wrap, batch, mlp, on_both_classes


def bytes_of_gradients_and_buckets(rank: int, _world_size: int) -> dict[str, int]:
    """Bytes of distinct storages that gradients and buckets occupy after three iterations."""
    found = {}
    for name, view, to_none in (
        ("copies", False, True),
        ("views", True, True),
        ("views, zeroed in place", True, False),
    ):
        ddp = DistributedDataParallel(mlp((4, 200, 200, 4), torch.float32, 0), gradient_as_bucket_view=view)
        for _ in range(3):
            ddp.zero_grad(set_to_none=to_none)
            ddp(torch.ones(2, 4)).sum().backward()
        tensors = [p.grad for p in ddp.parameters()] + [bucket.buffer for bucket in ddp.reducer.buckets]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        found[name] = sum(storages.values())
        found["parameters"] = sum(p.numel() * p.element_size() for p in ddp.parameters())
    return found


def test_views_of_the_buckets_are_the_gradients(two_ranks):
    """After the first iteration, whichever way gradients are zeroed; that is the memory saved.

    A bucket may begin up to a cache line into its memory; here there is one bucket.
    """
    for seen in two_ranks.run(bytes_of_gradients_and_buckets):
        lead_in_bytes = seen["views"] - seen["parameters"]
        assert 0 <= lead_in_bytes < CACHE_LINE_BYTES
        assert seen["copies"] == 2 * seen["parameters"] + lead_in_bytes
        assert seen["views, zeroed in place"] == seen["views"]


@given(st.lists(st.sampled_from([1, 1_000, 40_000, 100_000]), min_size=1, max_size=20))
def test_gradients_that_views_replace_are_freed_early(sizes):
    """While a bucket fills, no more than `MOST_WAITING_BYTES` of gradients take memory beside their views."""
    parameters = [nn.Parameter(torch.zeros(elements)) for elements in sizes]
    bucket = ViewBucket(range(len(sizes)), parameters)
    for slot, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, slot)
        if bucket.put([slot]):
            bucket.pack(2.0)
        assert sum(parameters[i].nbytes for i in bucket.waiting) <= MOST_WAITING_BYTES
    assert all(parameter.grad is view for parameter, view in zip(parameters, bucket.views, strict=True))
    assert all(view.eq(2 * slot).all() for slot, view in enumerate(bucket.views))


class SharesGradients(nn.Module):
    """Adds an embedding and a vector: the values of the embedding's sparse gradient are the vector's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(12))
        self.embedding = nn.Embedding(4, 3, sparse=True)

    def forward(self, rows: Tensor) -> Tensor:
        vector = self.vector.view(4, 3)  # so its gradient comes after the embedding's
        return self.embedding(rows) + vector


@on_both_classes
def sparse_gradients_in_shared_memory(wrap: Wrap, rank: int, options: dict) -> list[float]:
    """Averages of 2 on rank 0 and 4 on rank 1 for the vector, by iteration."""
    ddp = wrap(SharesGradients(), **options)
    averages = []
    for _ in range(3):
        ddp.zero_grad(set_to_none=True)
        (ddp(torch.arange(4)) * torch.full((4, 3), 2.0 * (rank + 1))).sum().backward()
        (found,) = set(ddp.module.vector.grad.tolist())
        assert set(ddp.module.embedding.weight.grad.to_dense().flatten().tolist()) == {3.0}
        averages.append(found)
    return averages


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 1e-6}, {"gradient_as_bucket_view": True}], ids=str)
def test_a_sparse_gradient_is_not_scaled_in_memory_that_a_dense_one_shares(two_ranks, options):
    """Torch divides the values in place, and so the dense gradient, which is divided again."""
    for ours, torchs in two_ranks.run(sparse_gradients_in_shared_memory, options):
        assert ours == [3.0] * 3
        assert torchs == [1.5] * 3


@on_both_classes
def wrong_after_channels_last(wrap: Wrap, rank: int, views: bool, hook: bool) -> list[int]:
    """Iterations with a wrong average of a module that is converted before the third one."""
    torch.manual_seed(0)
    module, twin = (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3)) for _ in range(2))
    ddp = wrap(module, gradient_as_bucket_view=views, bucket_cap_mb=1e-4)
    if hook:
        ddp.register_comm_hook(None, allreduce_hook)
    wrong = []
    for step in range(6):
        if step == 2:
            ddp.to(memory_format=torch.channels_last)
        ddp.zero_grad(set_to_none=step != 4)
        twin.zero_grad()
        twin.load_state_dict(module.state_dict())
        for one in range(2):
            x = batch(one, 2, 3, 6, 6, step=step)
            (twin(x).square().mean() / 2).backward()
            if one == rank:
                ddp(x).square().mean().backward()
        pairs = zip(module.parameters(), twin.parameters(), strict=True)
        if not all(torch.allclose(mine.grad, expected.grad, atol=1e-6) for mine, expected in pairs):
            wrong.append(step)
    return wrong


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("hook", [False, True])
def test_a_module_converted_to_channels_last_after_wrapping_is_averaged(two_ranks, views, hook):
    """`module.to` moves the gradients too, away from the memory of their buckets."""
    assert two_ranks.run(wrong_after_channels_last, views, hook) == [[[], [2, 3, 4, 5]]] * 2
