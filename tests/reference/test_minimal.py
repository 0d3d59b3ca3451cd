"""The four classes of `reference.minimal`: each trains as one process does, and the last launches in bucket order."""

from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ddplab.conformance.all_checks import CHECKS
from ddplab.conformance.check_runner import bench_on, run_check
from reference import minimal
from reference.bucketing import initial_buckets

from ..explore import examples
from .minimal_bodies import TERMS, Terms, train

NAMES = ("NaiveDataParallel", "FlatDataParallel", "BucketedDataParallel", "OverlappedDataParallel")
NAMES_OF_CHECKS = (
    "any timing", "overlap", "construction", "bucket caps", "special parameters", "kept gradients", "real models",
    "special values", "process group", "accumulation", "unused parameters", "comm hooks", "sparse gradients",
    "uneven inputs", "random programs",
)  # fmt: skip
"""A part of the kit, which takes a minute for each class as a whole."""
LACKS = {"accumulation", "unused parameters", "comm hooks", "sparse gradients", "uneven inputs"}
LITTLE = 4
MOST_LINES = 130
RANKS = 4


def outcomes(ranks, name, checks):
    """Outcome and message of each check on a class of `reference.minimal`."""
    with bench_on(ranks, f"reference.minimal:{name}", LITTLE) as bench:
        results = {check: run_check(check, CHECKS[check], bench) for check in checks}
    return {check: (result.outcome, result.message) for check, result in results.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_class_passes_the_kit_but_for_what_it_lacks(four_ranks, name):
    found = outcomes(four_ranks, name, NAMES_OF_CHECKS)
    assert {check: message for check, (outcome, message) in found.items() if outcome == "failed"} == {}
    lacking = {check: message for check, (outcome, message) in found.items() if outcome == "not supported"}
    if name != "OverlappedDataParallel":
        assert "by a call of the script: no overlap" in lacking.pop("overlap")
    assert set(lacking) == (LACKS - {"sparse gradients"} if name == "NaiveDataParallel" else LACKS)


def test_after_an_exception_the_overlapped_class_averages_again(four_ranks):
    """The pass that raised leaves complete, waiting and launched buckets behind."""
    check = "a backward pass that raises"
    assert outcomes(four_ranks, "OverlappedDataParallel", [check]) == {check: ("passed", "")}


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
