"""Bucket assignment, compared with torch's."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.bucketing import (
    MIB,
    ORDERS,
    assign_buckets,
    bucket_caps,
    check_partition,
    module_buckets,
    plan_buckets,
    rebuild_order,
    wrapped_modules,
)

DTYPES = (torch.float16, torch.float32, torch.float64)
tensor_lists = st.lists(
    st.builds(torch.empty, st.integers(0, 60), dtype=st.sampled_from(DTYPES)), min_size=1, max_size=20
)
cap_lists = st.lists(st.integers(0, 300), min_size=1, max_size=4)


@given(tensor_lists, cap_lists, st.data())
def test_registration_order_gives_exactly_torchs_buckets(tensors, caps, data):
    sparse = data.draw(st.lists(st.booleans(), min_size=len(tensors), max_size=len(tensors)))
    expected, _ = dist._compute_bucket_assignment_by_size(tensors, caps, sparse)
    sizes = [tensor.nbytes for tensor in tensors]
    assert assign_buckets(sizes, caps, keys=[t.dtype for t in tensors], sparse=sparse) == expected


@given(tensor_lists, cap_lists, st.data())
def test_ready_order_gives_torchs_buckets(tensors, caps, data):
    order = data.draw(st.permutations(range(len(tensors))))
    walked = [tensors[index] for index in order]
    expected, _ = dist._compute_bucket_assignment_by_size(walked, caps, [], order)
    got = assign_buckets([t.nbytes for t in tensors], caps, keys=[t.dtype for t in tensors], order=order)
    # torch leaves the order of buckets that are still open at the end to a hash table: one a dtype at most.
    still_open = len({tensor.dtype for tensor in tensors})
    assert sorted(got) == sorted(expected)
    closed = max(0, len(got) - still_open)
    assert got[:closed] == expected[:closed]


def test_orders_walk_as_they_are_called():
    sizes, ready = [3, 1, 1], [1, 2, 0]
    walked = {order: plan_buckets(order, sizes, [1], ready_order=ready) for order in ORDERS}
    assert walked == {
        "ready": [[1], [2], [0]],
        "reverse": [[2], [1], [0]],
        "forward": [[0], [1], [2]],
        "size": [[2], [1], [0]],
        "ready_from_last": [[1], [2], [0]],
    }


def test_ready_from_last_gives_the_first_cap_to_the_last_bucket():
    """`test_the_last_bucket_may_be_the_small_one` compares these buckets with those of torch's class."""
    for order, buckets in {"ready": [[0], [1, 2, 3], [4, 5]], "ready_from_last": [[1, 0], [4, 3, 2], [5]]}.items():
        assert plan_buckets(order, [1] * 6, [1, 3], ready_order=range(6)) == buckets


def test_only_without_a_cap_the_first_bucket_is_smaller():
    assert bucket_caps() == bucket_caps(None, []) == [1 * MIB, 25 * MIB]
    assert bucket_caps(5) == [5 * MIB]
    assert bucket_caps(5, [1, 2.5]) == [1 * MIB, 2.5 * MIB]
    assert assign_buckets([10, 10, 10], bucket_caps(float("inf"))) == [[0, 1, 2]]


def test_the_rebuild_walks_parameters_that_were_never_ready_last():
    assert rebuild_order([3, 1], 5) == [3, 1, 0, 2, 4]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: assign_buckets([1], []), "caps_bytes: expected at least one"),
        (lambda: assign_buckets([-1], [1]), "sizes_bytes: expected no negative size"),
        (lambda: assign_buckets([1, 2], [1], keys=["a"]), "keys: expected 2 entries"),
        (lambda: assign_buckets([1, 2], [1], sparse=[True]), "sparse: expected 2 entries"),
        (lambda: assign_buckets([1, 2], [1], order=[0, 0]), "order: expected each parameter index once"),
        (lambda: assign_buckets([1, 2], [1], order=[0, 2]), r"order: expected parameter indices 0 to 1, got \[2\]"),
        (
            lambda: wrapped_modules(["conv.weight", "fc.weight"]),
            "by numbers, such as .*, got conv.weight, fc.weight;",
        ),
        (lambda: bucket_caps(-1), "bucket caps: expected sizes in MiB, none negative"),
        (lambda: bucket_caps(None, [1, -1]), "bucket caps: expected sizes in MiB, none negative"),
        (lambda: bucket_caps(float("nan")), "bucket caps: expected sizes in MiB, none negative"),
        (lambda: plan_buckets("backward", [1], [1], ready_order=[0]), "order: expected one of ready, reverse"),
        (lambda: check_partition([[0], []], 1), "bucket 1 is empty"),
        (lambda: check_partition([[0], [3]], 2), r"expected parameter indices 0 to 1, got \[3\]"),
        (lambda: check_partition([[0, 1], [1]], 2), r"parameters \[1\] are in more than one bucket"),
        (lambda: check_partition([[0]], 2), r"parameters \[1\] are in no bucket"),
    ],
)
def test_arguments_that_do_not_fit_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


DECODER = [
    "tok_embeddings.weight",
    *(f"layers.{block}.{part}" for block in range(2) for part in ("attention.wq.weight", "experts.1.weight")),
    "norm.weight",
    "output.weight",
]


def test_modules_are_wrapped_as_by_torchtitan():
    """Each block, named by its first number, what follows the blocks as one, and the root for the rest."""
    head = ("norm", "output")
    first, second = ("layers.0",), ("layers.1",)
    assert wrapped_modules(DECODER) == [(), first, first, second, second, head, head]
    assert wrapped_modules(["0.weight", "2.weight"]) == [("0",), ("2",)]
    assert wrapped_modules(["model.layers.7.weight", "model.norm.weight"]) == [("model.layers.7",), ("model.norm",)]
    assert wrapped_modules(["layers.0.weight", "scale"]) == [("layers.0",), ()]  # the root's own


def test_modules_are_launched_when_their_last_gradient_is_ready_and_the_root_last():
    assert module_buckets(DECODER, range(7)[::-1]) == [[5, 6], [3, 4], [1, 2], [0]]
    assert module_buckets(DECODER, [0, 6, 5, 4, 3, 2, 1]) == [[5, 6], [3, 4], [1, 2], [0]]
    assert module_buckets(DECODER, [6, 4, 3, 5, 2, 1, 0]) == [[3, 4], [5, 6], [1, 2], [0]]


@given(st.lists(st.integers(0, 4), min_size=1), st.booleans(), st.booleans(), st.randoms())
def test_modules_partition_the_parameters(blocks, starts, ends, chance):
    names = [*["first.weight"] * starts, *(f"layers.{block}.weight" for block in blocks), *["last.weight"] * ends]
    order = chance.sample(range(len(names)), len(names))
    buckets = module_buckets(names, order)
    check_partition(buckets, len(names))
    assert len(buckets) == len(set(wrapped_modules(names)))


def test_open_buckets_come_last_in_the_order_in_which_they_were_opened():
    """Torch leaves that order to a hash table."""
    keys = ["half", "float", "half", "double"]
    assert assign_buckets([4, 4, 4, 4], [100], keys=keys, order=[3, 0, 1, 2]) == [[3], [0, 2], [1]]
