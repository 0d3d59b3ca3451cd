"""Broadcasts of tensors in pieces, and of buffers."""

import functools
import warnings
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from ddplab.reference import message_sizes
from ddplab.reference.broadcast import broadcast_coalesced
from ddplab.reference.data_parallel import DistributedDataParallel

from .. import scenarios
from ..explore import examples
from ..scenarios import ODD_BUFFERS


@functools.cache
def three_of_four() -> dist.ProcessGroup:
    """A group without rank 0; made once."""
    return dist.new_group([1, 2, 3])


def broadcast_odd_tensors(rank: int, _world_size: int, kinds: list[str], source: int, piece_bytes: int) -> list:
    """Tensors of each rank of a group after a broadcast from one of them, and those that it had before."""
    group = three_of_four()
    if rank == 0:
        return []
    tensors, sent = (
        [ODD_BUFFERS[kind](torch.arange(24.0) * (number + 1) * of) for number, kind in enumerate(kinds)]
        for of in (rank, source + 1)
    )
    with mock.patch.object(message_sizes, "PIECE_BYTES", piece_bytes):
        broadcast_coalesced(tensors, group, source=source)
    return [
        ([*tensor.resolve_conj().tolist()], [*was.resolve_conj().tolist()])
        for tensor, was in zip(tensors, sent, strict=True)
    ]


@examples(20)
@given(
    st.lists(st.sampled_from(list(scenarios.ODD_BUFFERS)), min_size=1, max_size=5),
    st.integers(0, 2),
    st.sampled_from([1, 100, 10**6]),
)
def test_tensors_of_any_layout_are_sent_from_any_rank_of_a_group(four_ranks, kinds, source, piece_bytes):
    """Expanded and conjugate ones too: torch's class raises for the former and leaves the latter as they are."""
    for seen in four_ranks.run(broadcast_odd_tensors, kinds, source, piece_bytes):
        assert all(got == sent for got, sent in seen)


def local_buffers(rank: int, _world_size: int) -> bool:
    module = nn.Linear(1, 1)
    module.register_buffer("own", torch.full((1 + rank,), float(rank)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddp = DistributedDataParallel(module, broadcast_buffers=False)
    ddp(torch.ones(1, 1)).sum().backward()
    return bool((module.own == rank).all())


def test_buffers_that_stay_local_may_differ(two_ranks):
    """With broadcast_buffers=False nothing is ever done with them."""
    assert all(two_ranks.run(local_buffers))


def tensors_around_others(rank: int, _world_size: int) -> list[float]:
    """A parameter and a buffer with two tensors inside, and the parameter's gradient, after a step."""
    module = nn.Linear(2, 1)
    module.weight = nn.Parameter(TwoTensor(torch.full((1, 2), 1.0 + rank), torch.full((1, 2), 2.0 + rank)))
    module.register_buffer("own", TwoTensor(torch.full((2,), 3.0 + rank), torch.full((2,), 4.0 + rank)))
    ddp = DistributedDataParallel(module)
    ddp(torch.full((1, 2), 1.0 + rank)).sum().backward()
    return [part.sum().item() for one in (module.weight, module.own, module.weight.grad) for part in (one.a, one.b)]


def test_tensors_inside_of_others_are_sent_and_averaged(two_ranks):
    """In torch's class the second of two may stay as it is; ours made more collectives on rank 0 than on rank 1."""
    assert two_ranks.run(tensors_around_others) == [[2.0, 4.0, 6.0, 8.0, 3.0, 3.0]] * 2
