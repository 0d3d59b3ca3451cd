"""A modelled network between processes: the data of Gloo, and ends that are never before those of the fabric."""

import time
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from reference.data_parallel import DistributedDataParallel
from reference.errors import RankError
from simulator import Fabric
from tutorials.wall_clock_network import WallGroup, modelled_network

MS = 1_000_000
operations = st.sampled_from(["sum", "max", "broadcast", "gather"])


def launch(operation: str, rank: int, world_size: int, elements: int):
    """Launch a collective; returns its work, and a function that says whether the result is right."""
    tensor = torch.full((elements,), float(rank + 1))
    if operation == "gather":
        outputs = [torch.zeros(elements) for _ in range(world_size)]
        work = dist.all_gather(outputs, tensor, async_op=True)
        return work, lambda: all((one == source + 1).all() for source, one in enumerate(outputs))
    if operation == "broadcast":
        return dist.broadcast(tensor, world_size - 1, async_op=True), lambda: bool((tensor == world_size).all())
    total = {"sum": world_size * (world_size + 1) / 2, "max": world_size}[operation]
    kind = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[operation]
    return dist.all_reduce(tensor, kind, async_op=True), lambda: bool((tensor == total).all())


def run_program(rank: int, world_size: int, fabric: Fabric, program: list[tuple[str, int, int]]):
    """Launch collectives, each after a pause in milliseconds; return launch and end moments, and what is wrong."""
    before = dist.group.WORLD
    with modelled_network(fabric) as group:
        assert isinstance(dist.group.WORLD, WallGroup)
        launched, ends, checks, works = [], {}, [], []
        for number, (operation, elements, pause_ms) in enumerate(program):
            time.sleep(pause_ms / 1e3)
            launched.append(time.monotonic_ns())
            work, check = launch(operation, rank, world_size, elements)
            work.get_future().add_done_callback(
                partial(lambda number, _: ends.setdefault(number, time.monotonic_ns()), number)
            )
            works.append(work)
            checks.append(check)
        for work in works:
            work.wait()
        while len(ends) < len(works):  # callbacks may still run
            time.sleep(1e-3)
        assert all(work.is_completed() for work in works)
        assert len(group.late_ns) == len(works)
    assert dist.group.WORLD is before
    return launched, [ends[number] for number in range(len(works))], [check() for check in checks]


@given(st.lists(st.tuples(operations, st.integers(1, 5000), st.sampled_from([0, 0, 1, 8])), min_size=1, max_size=5))
def test_data_arrives_and_no_collective_ends_before_the_fabric_lets_it(two_ranks, program):
    """These lower bounds hold however busy the machine is: collectives wait for the last rank and for each other."""
    by_rank = two_ranks.run(run_program, Fabric.from_alpha_beta(4 * MS, 1e7), program)
    earliest_ns = [0]
    for moments in zip(*(launched for launched, _, _ in by_rank), strict=True):
        earliest_ns.append(max(*moments, earliest_ns[-1]) + 4 * MS)
    for _, ends_ns, right in by_rank:
        assert all(right)
        assert all(end >= earliest for end, earliest in zip(ends_ns, earliest_ns[1:], strict=True))


def train(rank: int, _world_size: int, fabric: Fabric | None):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    with nullcontext() if fabric is None else modelled_network(fabric):
        ddp = DistributedDataParallel(module, bucket_cap_mb=1e-4)
        for step in range(3):
            ddp.zero_grad()
            ddp(torch.full((4, 8), float(rank + step))).sum().backward()
        ddp.reducer.detach()
    return [parameter.grad for parameter in module.parameters()]


def test_a_reducer_trains_on_it_as_on_gloo(two_ranks):
    modelled = two_ranks.run(train, Fabric.from_alpha_beta(100_000, 1e9))
    for ours, gloo in zip(modelled, two_ranks.run(train, None), strict=True):
        for mine, theirs in zip(ours, gloo, strict=True):
            assert torch.equal(mine, theirs)


def fail(rank: int, _world_size: int):
    with modelled_network(Fabric.from_alpha_beta(0, 1e9)):
        raise ArithmeticError(f"rank {rank} fails")


def test_an_error_inside_ends_the_network(two_ranks):
    with pytest.raises(RankError, match="fails"):
        two_ranks.run(fail)
