"""All comm hooks: on torch's class and on ours, in two ways to say the same, and the bytes that they send."""

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.data_parallel import DistributedDataParallel

from .. import hook_bodies
from ..explore import examples
from ..hook_bodies import Given, Shapes, given_gradients, register, train
from ..scenarios import assert_same, assert_same_pairs
from ..strategies import caps_mb, hook_shapes

BOTH = ("ours", "torch")
seeds = st.integers(0, 1000)
modes = st.fixed_dictionaries({"gradient_as_bucket_view": st.booleans(), "bucket_cap_mb": caps_mb()})
HOOKS = [("ours", name) for name in hook_bodies.OURS] + [("torch", name) for name in ("allreduce", "fp16", "local")]


@pytest.mark.parametrize("hook", HOOKS, ids=str)
@examples(6)
@given(hook_shapes(), modes, seeds)
def test_our_hooks_and_torchs_do_the_same_on_torchs_class_and_on_ours(two_ranks, hook, shapes, options, seed):
    assert_same_pairs(train(two_ranks, hook, shapes, seed, wrappers=BOTH, options=options))


@examples(5)
@given(hook_shapes(scalars=False), seeds)
def test_torchs_powersgd_does_the_same_on_torchs_class_and_on_ours(two_ranks, shapes, seed):
    """One bucket: with several, on Gloo, it issues collectives in an order that differs between ranks."""
    assert_same_pairs(train(two_ranks, ("torch", "power"), shapes, seed, wrappers=BOTH))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (("ours", "allreduce"), ("torch", "allreduce")),
        (("ours", "compress(fp16)(allreduce)"), ("ours", "fp16")),
        (("ours", "compress(bf16)(allreduce)"), ("ours", "bf16")),
        (("ours", "fp16"), ("torch", "fp16")),
        (("ours", "bf16"), ("torch", "bf16")),
        (("ours", "bf16"), ("torch", "bf16 wrapper")),
    ],
    ids=str,
)
@examples(5)
@given(hook_shapes(), modes, seeds)
def test_two_ways_to_say_the_same_give_the_same_bits(two_ranks, a, b, shapes, options, seed):
    assert_same(*(train(two_ranks, hook, shapes, seed, options=options) for hook in (a, b)))


def bytes_given(rank: int, _world_size: int, hook: str, shapes: Shapes) -> int:
    """Bytes that this rank passes to the collectives of one iteration."""
    given = []

    def count(name: str) -> Any:
        real = getattr(dist, name)

        def counted(*tensors: Any, **arguments: Any) -> Any:
            given.append(tensors[-1].nbytes)
            return real(*tensors, **arguments)

        return mock.patch.object(dist, name, counted)

    ddp = DistributedDataParallel(Given(shapes))
    register(ddp, hook)
    with count("all_reduce"), count("all_gather"):
        ddp(given_gradients(rank, shapes, 0, 0)).backward()
    return sum(given)


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        ("allreduce", 4 * 1300),
        ("fp16", 2 * 1300),
        ("bf16", 2 * 1300),
        ("per tensor", 1300 + 8),
        ("per channel", 3 * 512 + 3 * 8),
        ("noop", 0),
    ],
)
def test_other_hooks_send_as_many_bytes_as_they_say(two_ranks, hook, expected):
    assert two_ranks.run(bytes_given, hook, ((20, 30), (700,))) == [expected] * 2
