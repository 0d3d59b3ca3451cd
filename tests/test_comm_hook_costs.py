"""The twin's proof: the simulator's collectives are those that the real reducer and the real hooks issue."""

from functools import partial
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reference.trace import Trace
from simulator import Fabric
from simulator.schedule.hook_messages import BatchedPowerSGD, CommHook, PowerSGD, named_hook
from simulator.schedule.policy import Phase, Policy
from simulator.schedule.schedule import Compute, LaunchCollective, buckets_of, build_join_end, build_schedule
from simulator.step_costs import messages_of
from simulator.workload.compute_times import recorded_model

from . import hook_cost_bodies
from .explore import examples
from .strategies import caps_mb, hook_shapes, integer_programs, message_shapes, partitions

FABRIC = Fabric.from_alpha_beta(alpha_ns=100, bytes_per_s=1e9)
PHASES: tuple[Phase, ...] = ("first", "rebuild", "steady", "steady")
STATIC_PHASES: tuple[Phase, ...] = ("first", "second", "rebuild", "steady")
PROGRAMS = integer_programs(2, ["train"] * 4)
CAPS = st.fixed_dictionaries({"bucket_cap_mb": caps_mb()}) | st.fixed_dictionaries(
    {"bucket_cap_mb_list": st.lists(st.floats(1e-6, 3e-4), min_size=1, max_size=3)}
)


def predicted_messages(
    trace: Trace, phase: Phase, world_size: int = 2, *, joins: bool = False, **settings: Any
) -> hook_cost_bodies.Cycle:
    """Transport and bytes of every collective of each iteration of a cycle, in order."""
    model = recorded_model(trace, unused_allowed=True)
    policy = Policy(phase=phase, **settings)
    schedule = build_schedule(policy, model, buckets_of(policy, model), joins=joins)
    messages, sent = messages_of(schedule), [[]]
    for instruction in schedule.instructions:
        if isinstance(instruction, LaunchCollective):
            sent[-1].append(messages[instruction.collective])
        elif isinstance(instruction, Compute) and instruction.kind == "unsynchronized":
            sent.append([])
    return sent


def assert_predicted(results: list, settings: dict[str, Any], phases: tuple[Phase | None, ...] = PHASES) -> None:
    """Every rank issued the predicted collectives; the trace is rank 0's, whose ready order decides the buckets."""
    trace = results[0][0]
    for _, seen, *_ in results:
        for phase, sent in zip(phases, seen, strict=True):
            assert phase is None or sent == predicted_messages(trace, phase, len(results), **settings)


@examples(25)
@given(PROGRAMS, CAPS, st.booleans(), st.booleans())
def test_plain_iterations_issue_the_schedules_collectives(two_ranks, program, caps, buffers, view):
    """First with one bucket, then with the rebuild's broadcast, then in rebuilt buckets; buffers by dtype."""
    options = caps | {"gradient_as_bucket_view": view}
    results = two_ranks.run(hook_cost_bodies.of_integers, program, options | {"forward_sync_buffers": buffers})
    assert_predicted(results, options | {"broadcast_buffers": buffers})


@examples(10)
@given(PROGRAMS, st.data())
def test_a_plan_is_never_rebuilt(two_ranks, program, data):
    plan = data.draw(partitions(len(program.weights), [weight.dtype for weight in program.weights]))
    results = two_ranks.run(hook_cost_bodies.of_integers, program, {"plan": plan})
    assert_predicted(results, {"plan": plan})


@examples(15)
@given(PROGRAMS, CAPS)
def test_with_find_unused_parameters_each_iteration_ends_with_the_bitmap(two_ranks, program, caps):
    options = caps | {"find_unused_parameters": True}
    results = two_ranks.run(hook_cost_bodies.of_integers, program, options)
    assert_predicted(results, options)
    assert all(sent[-1] == ("all_reduce", 4 * len(program.weights)) for (sent,) in results[0][1])


@examples(15)
@given(PROGRAMS, CAPS, st.booleans())
def test_a_static_graph_sends_the_bitmap_once_and_rebuilds_one_iteration_later(two_ranks, program, caps, searching):
    """Its first iteration does not tell the order; the second runs in the buckets of the first."""
    options = caps | {"static_graph": True, "find_unused_parameters": searching}
    results = two_ranks.run(hook_cost_bodies.of_integers, program, options)
    assert_predicted(results, options, STATIC_PHASES)


@pytest.mark.parametrize("which", ["a", "b", "ab"])
@pytest.mark.parametrize(
    ("settings", "phases"),
    [
        ({"find_unused_parameters": True}, PHASES),
        ({"find_unused_parameters": True, "skip_all_reduce_unused_params": True}, PHASES),
        ({"static_graph": True}, STATIC_PHASES),
    ],
    ids=["find_unused_parameters", "skip_all_reduce_unused_params", "static_graph"],
)
def test_unused_parameters_travel_too_unless_their_buckets_are_skipped(two_ranks, which, settings, phases):
    options = settings | {"bucket_cap_mb": 1e-6}
    assert_predicted(two_ranks.run(hook_cost_bodies.of_branches, which, options), options, phases)


@examples(10)
@given(PROGRAMS, CAPS, st.integers(2, 3), st.booleans())
def test_a_cycle_under_no_sync_sends_what_one_iteration_does(two_ranks, program, caps, sync_every, searching):
    """The buffers once too: with the first forward pass, which follows a synchronised one."""
    options = caps | {"find_unused_parameters": searching}
    results = two_ranks.run(partial(hook_cost_bodies.of_integers, sync_every=sync_every), program, options)
    assert_predicted(results, options | {"sync_every": sync_every})


@pytest.mark.parametrize("buffers", [True, False])
@pytest.mark.parametrize("sync_every", [1, 3])
def test_under_join_ranks_also_agree_on_whose_buffers_count_and_whether_any_averages(two_ranks, buffers, sync_every):
    """And at its end on whose model all get."""
    body = partial(hook_cost_bodies.under_join, sync_every=sync_every)
    results = two_ranks.run(body, (4 * sync_every,) * 2, {"forward_sync_buffers": buffers})
    settings = {"bucket_cap_mb": None, "broadcast_buffers": buffers, "sync_every": sync_every}
    assert_predicted(results, settings | {"joins": True})
    trace, _, end = results[0]
    assert messages_of(build_join_end(Policy(**settings), recorded_model(trace))) == end


@examples(10)
@given(st.integers(2, 30), st.data(), st.sampled_from(["none", "noop"]))
def test_of_sparse_gradients_the_touched_rows_are_gathered(two_ranks, rows, data, name):
    touched = data.draw(st.integers(1, rows))
    settings = {"bucket_cap_mb": 25}
    results = two_ranks.run(hook_cost_bodies.of_embeddings, rows, touched, settings, (NAMES[name], {}))
    assert_predicted(results, settings | {"hook": named_hook(name), "sparse_density": touched / rows}, PHASES[:3])


# Comm hooks

NAMES = {
    "none": "allreduce",
    "noop": "noop",
    "fp16": "fp16",
    "bf16": "bf16",
    "quantize_per_tensor": "per tensor",
    "quantize_per_channel": "per channel",
}
"""A hook's name here: that of the real one in `hook_bodies`."""


@pytest.mark.parametrize("name", [name for name in NAMES if "quantize" not in name])
@examples(8)
@given(message_shapes(), st.sampled_from(["float32", "float64"]), caps_mb())
def test_a_hooks_messages_are_what_the_real_hook_sends(two_ranks, name, shapes, dtype, cap):
    _assert_messages(two_ranks, name, shapes, dtype, cap)


@pytest.mark.parametrize("name", ["quantize_per_tensor", "quantize_per_channel"])
@examples(8)
@given(hook_shapes(), st.sampled_from(["float32", "float64"]), caps_mb())
@example(shapes=((0, 3), (600,), ()), dtype="float32", cap=None)
def test_quantised_messages_are_what_the_real_hook_gathers(two_ranks, name, shapes, dtype, cap):
    """Of buckets with elements: the real hooks take no others."""
    _assert_messages(two_ranks, name, shapes, dtype, cap)


def _assert_messages(pool, name, shapes, dtype, cap):
    settings = {"bucket_cap_mb": cap}
    results = pool.run(hook_cost_bodies.of_hook, shapes, dtype, settings, (NAMES[name], {}))
    assert_predicted(results, settings | {"hook": named_hook(name)})


@examples(10)
@given(message_shapes(), caps_mb(), st.integers(1, 3))
def test_a_hook_of_halved_gradients_sends_halves(two_ranks, shapes, cap, rank):
    state = {"matrix_approximation_rank": rank, "min_compression_rate": 2.0}
    settings = {"bucket_cap_mb": cap}
    results = two_ranks.run(hook_cost_bodies.of_hook, shapes, "float32", settings, ("compress(bf16)(power)", state))
    assert_predicted(
        results, settings | {"hook": named_hook(f"bf16+power_sgd:{rank}")}, (None, None, "steady", "steady")
    )


@pytest.mark.parametrize(("kind", "real"), [(PowerSGD, "power"), (BatchedPowerSGD, "batched power")])
@examples(25)
@given(message_shapes(), st.sampled_from(["float32", "float64"]), caps_mb(), st.integers(1, 4), st.floats(0.1, 3))
@example(shapes=((6, 5), (0,)), dtype="float32", cap=1e-6, rank=1, rate=0.5)
@example(shapes=((20, 30), (3,), (20, 30)), dtype="float32", cap=1e-6, rank=2, rate=2.0)
def test_powersgd_sends_ps_and_qs_in_turn(two_ranks, kind, real, shapes, dtype, cap, rank, rate):
    """P0, P1, Q0, P2, Q1, ..., each with what is not compressed, as soon as it compresses: in iteration 2."""
    state = {"matrix_approximation_rank": rank, "min_compression_rate": rate}
    settings = {"bucket_cap_mb": cap}
    results = two_ranks.run(hook_cost_bodies.of_hook, shapes, dtype, settings, (real, state))
    assert_predicted(results, settings | {"hook": kind(**state)}, (None, None, "steady", "steady"))
    assert_predicted(results, settings | {"hook": CommHook()}, ("first", "rebuild", None, None))
