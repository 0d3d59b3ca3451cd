"""The four classes of `minimal.py`: each trains as one process does, and the last launches in bucket order."""

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from ddplab.conformance.all_checks import CHECKS
from ddplab.conformance.check_runner import bench_on, run_checks
from ddplab.reference import minimal
from ddplab.reference.bucketing import MIB, initial_buckets

from ..explore import examples

NAMES = ("NaiveDataParallel", "FlatDataParallel", "BucketedDataParallel", "OverlappedDataParallel")
NAMES_OF_CHECKS = (
    "any timing", "overlap", "construction", "bucket caps", "special parameters", "kept gradients", "real models",
    "special values", "half-precision sums", "process group", "accumulation", "unused parameters", "comm hooks",
    "sparse gradients", "missing sparse gradients",
    "uneven inputs", "random programs",
)  # fmt: skip
"""A part of the kit, which takes a minute for each class as a whole."""
LACKS = {
    *("accumulation", "unused parameters", "comm hooks"),
    *("missing sparse gradients", "uneven inputs"),
}
LITTLE = 6
MOST_LINES = 130
RANKS = 4


def outcomes(ranks, name, checks):
    """Outcome and message of each check on a class of `ddplab.reference.minimal`."""
    with bench_on(ranks, f"ddplab.reference.minimal:{name}", LITTLE) as bench:
        results = list(run_checks(bench, [(check, CHECKS[check]) for check in checks]))
    return {result.check: (result.outcome, result.message) for result in results}


IN_CI = pytest.mark.slow  # the whole kit for each class: the class that a reader changes in `make test`, all in CI
OF_KIT = [name if name == "OverlappedDataParallel" else pytest.param(name, marks=IN_CI) for name in NAMES]


@pytest.mark.parametrize("name", OF_KIT)
def test_a_class_passes_the_kit_but_for_what_it_lacks(four_ranks, name):
    has_buckets = name not in ("NaiveDataParallel", "FlatDataParallel")
    found = outcomes(four_ranks, name, [check for check in NAMES_OF_CHECKS if has_buckets or check != "bucket caps"])
    failed = {check: message for check, (outcome, message) in found.items() if outcome == "failed"}
    if name != "NaiveDataParallel":
        assert "RuntimeError: reshape is not implemented for sparse" in failed.pop("sparse gradients")
    assert failed == {}
    lacking = {check: message for check, (outcome, message) in found.items() if outcome == "not supported"}
    if name != "OverlappedDataParallel":
        assert "by a call of the script: no overlap" in lacking.pop("overlap")
    assert set(lacking) == LACKS


def test_after_an_exception_the_overlapped_class_averages_again(four_ranks):
    """The pass that raised leaves complete, waiting and launched buckets behind."""
    check = "a backward pass that raises"
    assert outcomes(four_ranks, "OverlappedDataParallel", [check]) == {check: ("passed", "")}


TERMS = 6


class Terms(nn.Module):
    """The sum of squares of some of its parameters; parameter i has 2**i elements, so buckets have unequal sizes."""

    def __init__(self, start):
        super().__init__()
        self.weights = nn.ParameterList(
            torch.full((2**i,), float(start + i), dtype=torch.float64) for i in range(TERMS)
        )

    def forward(self, order, factor):
        """Autograd reaches the last term first, so gradients become ready in reverse `order`."""
        total = torch.zeros((), dtype=torch.float64)
        for index in order:
            total = total + factor * self.weights[index].square().sum()
        return total


def train_alone(orders, steps):
    """Weights of one process that trains with the inputs of all ranks, from rank 0's start."""
    module = Terms(start=1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.125)
    for _ in range(steps):
        optimizer.zero_grad()
        for rank, order in enumerate(orders):
            (module(order, factor=rank + 1) / len(orders)).backward()
        optimizer.step()
    return [weight.detach() for weight in module.weights]


def bucket_order(cap_bytes):
    """Elements of each bucket, in bucket order: the last parameters first."""
    buckets = initial_buckets([8 * 2**i for i in range(TERMS)], [cap_bytes])
    return [sum(2**i for i in bucket) for bucket in buckets]


full_orders = st.lists(st.permutations(range(TERMS)), min_size=RANKS, max_size=RANKS)
part_orders = full_orders.flatmap(
    lambda orders: st.tuples(
        *(st.integers(1, TERMS).map(lambda count, order=order: order[:count]) for order in orders)
    )
)
"""By rank, the parameters with a gradient, in reverse ready order; each rank has at least one."""
caps = st.sampled_from([1, 20, 60, 100, 200, 10_000])


def train(rank, world_size, name, cap_bytes, orders, steps):
    """Weights after some steps; by step, the number of elements of each all-reduce, in launch order."""
    make = getattr(minimal, name)
    caps = {"bucket_cap_mb": cap_bytes / MIB} if issubclass(make, minimal.BucketedDataParallel) else {}
    ddp = make(Terms(start=rank + 1), **caps)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)
    launched, all_reduce = [], dist.all_reduce
    with mock.patch.object(
        dist, "all_reduce", lambda flat, **kw: launched[-1].append(len(flat)) or all_reduce(flat, **kw)
    ):
        for _ in range(steps):
            launched.append([])
            optimizer.zero_grad()
            ddp(orders[rank], factor=rank + 1).backward()
            if name != "OverlappedDataParallel":
                ddp.average_gradients()
            optimizer.step()
        launched.append([])
        if name == "OverlappedDataParallel":
            ddp.average_gradients()  # finds nothing to do
    return [weight.detach() for weight in ddp.module.weights], launched


@examples(5)
@example([[0], [TERMS - 1], [1, 2], [3]], 60)
@given(part_orders, caps)
def test_a_parameter_without_a_gradient_on_some_ranks_counts_as_zero_there(four_ranks, orders, cap_bytes):
    expected = train_alone(orders, 3)
    for name in NAMES[1:]:
        for weights, _ in four_ranks.run(train, name, cap_bytes, orders, 3):
            assert all(map(torch.equal, weights, expected)), name


@examples(8)
@example([[0], [TERMS - 1], [1, 2], [3]], 1)
@given(part_orders, caps)
def test_launch_order_is_bucket_order_on_every_rank_whatever_the_ready_orders(four_ranks, orders, cap_bytes):
    expected = bucket_order(cap_bytes)
    for name in NAMES[2:]:
        for _, launched in four_ranks.run(train, name, cap_bytes, orders, 2):
            assert launched == [expected, expected, []], name


def test_the_file_is_short():
    assert len(Path(minimal.__file__).read_text().splitlines()) <= MOST_LINES
