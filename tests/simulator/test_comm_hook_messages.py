"""Messages of comm hooks: the simulator's are those that the real hooks send, under the emulated reducer."""

from functools import partial
from math import prod
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddplab.emulation import emulate, virtual_training
from ddplab.reference.trace import Trace
from ddplab.simulator import Fabric, predict
from ddplab.simulator.schedule.comm_hook_messages import HOOKS, CommHook, named_hook

from ..explore import examples
from ..strategies import caps_mb, iteration, message_shapes, trace_of
from .changed_traces import with_parameters

FABRIC = Fabric.from_alpha_beta(alpha_ns=100, bytes_per_s=1e9)
ELEMENT_BYTES = {"float32": 4, "float64": 8}
dtypes = st.sampled_from(list(ELEMENT_BYTES))


def trace_with(shapes, dtype: str) -> Trace:
    """A trace of parameters of these shapes."""
    sizes = [ELEMENT_BYTES[dtype] * prod(shape) for shape in shapes]
    trace = trace_of([[iteration(1, tuple(range(2, 2 + len(sizes))), 9, 1)]], sizes)
    return with_parameters(trace, shape=list(shapes), dtype=[dtype] * len(shapes))


def assert_sends_as_predicted(trace: Trace, hook: CommHook, **settings) -> None:
    real, predicted = (
        one(trace, FABRIC, world_size=2, hook=hook, **settings).timeline.engine_input.schedule.collectives
        for one in (emulate.emulate, predict)
    )
    assert [one[2:] for one in real] == [one[2:] for one in predicted]


@examples(10)
@given(st.integers(2, 30), st.data(), st.sampled_from(["none", "noop"]))
def test_of_sparse_gradients_the_touched_rows_are_gathered(rows, data, name):
    density = data.draw(st.integers(1, rows)) / rows
    trace = with_parameters(trace_with([(rows, 5), (3, 5)], "float32"), sparse=[True, False])
    assert_sends_as_predicted(trace, named_hook(name), sparse_density=density)


@pytest.mark.parametrize("name", [*(name for name in HOOKS if "power" not in name), "bf16+power_sgd:2"])
@examples(8)
@given(message_shapes(), dtypes, caps_mb())
@example(shapes=((0, 3), (600,), ()), dtype="float32", cap=None)
def test_a_hooks_messages_are_what_the_real_hook_sends(name, shapes, dtype, cap):
    assert_sends_as_predicted(trace_with(shapes, dtype), named_hook(name), bucket_cap_mb=cap)


@pytest.mark.parametrize("kind", ["power_sgd", "batched_power_sgd"])
@examples(25)
@given(message_shapes(), dtypes, caps_mb(), st.integers(1, 4), st.floats(0.1, 3))
@example(shapes=((6, 5), (0,)), dtype="float32", cap=1e-6, rank=1, rate=0.5)
@example(shapes=((20, 30), (3,), (20, 30)), dtype="float32", cap=1e-6, rank=2, rate=2.0)
def test_powersgd_sends_ps_and_qs_in_turn(kind, shapes, dtype, cap, rank, rate):
    """P0, P1, Q0, P2, Q1, ..., each with what is not compressed."""
    real_hook, hook = virtual_training.real_hook, named_hook(f"{kind}:{rank}")

    def with_rate(name: str):
        function, make_state = real_hook(name)
        return function, partial(make_state, min_compression_rate=rate)

    with mock.patch.object(virtual_training, "real_hook", with_rate), mock.patch.object(emulate, "_check_hook"):
        rated = hook.model_copy(update={"min_compression_rate": rate})
        assert_sends_as_predicted(trace_with(shapes, dtype), rated, bucket_cap_mb=cap)
