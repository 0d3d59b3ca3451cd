"""Schedules: which steps and collectives an iteration has, in which order, as the real reducer issues them."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.bucketing import ORDERS, bucket_caps, plan_buckets
from reference.trace import Trace
from simulator import Fabric, predict
from simulator.fabric import Linear, Processor
from simulator.schedule.comm_hook_messages import PowerSGD
from simulator.schedule.policy import Phase, Policy
from simulator.schedule.schedule import Compute, LaunchCollective, buckets_of, build_join_end, build_schedule
from simulator.step_costs import messages_of
from simulator.workload.compute_times import recorded_model

from ..explore import examples
from ..strategies import caps_mb, integer_programs, iteration, partitions, trace_of, traces
from . import hook_cost_bodies
from .span_lines import ALIKE, fabric, lines_of

FABRIC = Fabric.from_alpha_beta(alpha_ns=100, bytes_per_s=1e9, concurrency=2)
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
    schedule = build_schedule(policy, model, joins=joins)
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


@given(traces(), caps_mb(), st.sampled_from(ORDERS))
def test_buckets_are_those_of_the_reducers_own_rule(trace, cap, order):
    expected = plan_buckets(
        order, trace.sizes_bytes, bucket_caps(cap), ready_order=recorded_model(trace).ready_order, keys=trace.keys
    )
    prediction = predict(trace, FABRIC, world_size=2, bucket_cap_mb=cap, order=order)
    assert prediction.buckets == tuple(map(tuple, expected))
    assert buckets_of(Policy(bucket_cap_mb=cap, order=order), recorded_model(trace)) == expected


def test_buffers_are_broadcast_before_forward():
    lines = lines_of([ALIKE], [[0, 1]], fabric(8), buffer_bytes=[4, 4, 4])
    assert {"  0-  8 rank 0 broadcast", "  0-  8 rank 0 queued", "  8- 16 rank 0 broadcast"} <= set(lines)
    assert {" 16- 24 rank 0 broadcast", " 24- 34 rank 0 forward"} <= set(lines)


def test_two_pieces_of_buffers_are_broadcast_at_a_time():
    """A piece holds the buffers of one dtype; the third is launched when the first has arrived."""
    lines = lines_of([ALIKE], [[0, 1]], fabric(8, concurrency=3), buffer_bytes=[4, 4, 4])
    assert lines.count("  0-  8 rank 0 broadcast") == 2
    assert "  8- 16 rank 0 broadcast" in lines


def test_unused_parameters_are_searched_for_and_the_map_is_added_up():
    unused = iteration(forward_ns=10, ready_ns=(30, None), backward_end_ns=32, step_ns=5)
    costs = fabric(8, processor=Processor(search_ns_per_parameter=2))
    lines = lines_of([unused], [[1], [0]], costs, find_unused_parameters=True)
    assert " 10- 14 rank 0 search" in lines
    assert " 34- 42 rank 0 all_reduce 0" in lines  # the unused one counts as ready with the first gradient
    assert " 42- 50 rank 0 all_reduce 1" in lines
    assert " 50- 58 rank 0 bitmap" in lines
    assert " 36- 58 rank 0 wait" in lines  # a gradient that no rank used must not be copied out
    assert lines[-1] == " 58- 63 rank 0 step"


def test_where_all_parameters_are_used_the_map_is_waited_for_last():
    costs = fabric(8, processor=Processor(copy_out=Linear(fixed_ns=1)))
    lines = lines_of([ALIKE], [[0, 1]], costs, find_unused_parameters=True)
    assert {" 38- 40 rank 0 copy_out 0", " 40- 46 rank 0 wait", " 46- 51 rank 0 step"} <= set(lines)


def test_the_rebuild_comes_before_the_second_forward_pass():
    costs = fabric(8, processor=Processor(rebuild_ns=3))
    lines = lines_of([ALIKE], None, costs, phase="rebuild")
    assert {"  0-  8 rank 0 order", "  8- 11 rank 0 rebuild", " 11- 21 rank 0 forward"} <= set(lines)
    assert not any("rebuild" in line for line in lines_of([ALIKE], None, costs, find_unused_parameters=True))


def test_two_dtypes_are_refused_where_torch_does():
    trace = trace_of([[ALIKE]], [4, 4])
    floats = trace.workload.parameters[0].model_copy(update={"dtype": "float32", "shape": (1,)})
    mixed = trace.workload.model_copy(update={"parameters": (floats, trace.workload.parameters[1])})
    trace = trace.model_copy(update={"workload": mixed})
    with pytest.raises(ValueError, match="plan: expected one dtype per bucket, bucket 0 has float32 and int8"):
        predict(trace, fabric(8), world_size=2, plan=[[0, 1]])
    with pytest.raises(
        ValueError, match="zero: expected one dtype, as ZeroRedundancyOptimizer does, got float32 and"
    ):
        predict(trace, fabric(8), world_size=2, zero="buckets")


def test_iterations_under_no_sync_only_compute():
    lines = lines_of([ALIKE], [[0, 1]], fabric(8), sync_every=3)
    assert lines[:2] == ["  0- 37 rank 0 unsynchronized", " 37- 74 rank 0 unsynchronized"]
    assert "104-112 rank 0 all_reduce 0" in lines


def test_buffers_are_sent_before_the_first_iteration_of_a_cycle():
    assert lines_of([ALIKE], [[0, 1]], fabric(8), sync_every=2, buffer_bytes=(4,))[1:3] == [
        "  0-  8 rank 0 wait",
        "  8- 45 rank 0 unsynchronized",
    ]


def test_under_join_ranks_with_inputs_do_not_wait_for_the_counts():
    """Ranks count those with inputs, and whether any averages, but only ranks without inputs need the results."""
    late = iteration(forward_ns=20, ready_ns=(40, 30), backward_end_ns=42, step_ns=5)
    lines = lines_of([ALIKE, late], [[0, 1]], fabric(8), sync_every=3, inputs=[3, 3])
    assert [line for line in lines if line.endswith(("rank 0 unsynchronized", "rank 0 wait"))] == [
        "  0- 37 rank 0 unsynchronized", " 37- 74 rank 0 unsynchronized",
    ]  # fmt: skip


def test_a_second_collective_follows_the_launch_of_the_next_bucket():
    matrices = iteration(forward_ns=10, ready_ns=(30, 20), backward_end_ns=32, step_ns=5)
    trace = trace_of([[matrices]], [400, 400])
    shaped = tuple(parameter.model_copy(update={"shape": (20, 20)}) for parameter in trace.workload.parameters)
    trace = trace.model_copy(update={"workload": trace.workload.model_copy(update={"parameters": shaped})})
    hook = PowerSGD(compress=Linear(fixed_ns=1), recompress=Linear(fixed_ns=2), decompress=Linear(fixed_ns=3))
    spans = predict(trace, fabric(4), world_size=2, plan=[[1], [0]], hook=hook).spans
    lines = [f"{s.start_ns}-{s.end_ns} {s.kind} {s.bucket}" for s in spans if s.kind not in ("forward", "step")]
    assert [line for line in lines if "all_reduce" in line] == [
        "21-25 all_reduce 0", "32-36 all_reduce 1", "36-40 second_all_reduce 0", "40-44 second_all_reduce 1",
    ]  # fmt: skip
    assert {"32-34 recompress 0", "36-38 recompress 1", "40-43 decompress 0", "44-47 decompress 1"} <= set(lines)


def test_a_rank_without_inputs_takes_part_in_all_collectives():
    trace = trace_of([[ALIKE]], [4, 4])
    prediction = predict(trace, fabric(8), world_size=2, plan=[[0, 1]], inputs=[2, 1])
    assert prediction.samples_ns == (43, 43)  # rank 0 does not wait for the counts
    lines = {f"{s.start_ns}-{s.end_ns} {s.kind}" for s in prediction.spans if s.rank == 1}  # of the second iteration
    assert lines == {
        "0-8 join", "0-8 wait", "8-16 join", "8-16 wait", "16-30 straggler", "30-38 all_reduce", "16-38 wait",
    }  # fmt: skip


# Grouping by modules


def decoder(names=("embedding.weight", "layers.0.weight", "layers.1.weight", "head.weight"), **of_the_first) -> Trace:
    """A model whose gradients, of 4 bytes each, are ready at 40, 30, 20 and 10; fields of the first parameter."""
    trace = trace_of([[iteration(5, (40, 30, 20, 10), 45, 7)]], [4, 4, 4, 4])
    first, *others = (
        one.model_copy(update={"name": name, "dtype": "float32", "shape": (1, 1)})
        for one, name in zip(trace.workload.parameters, names, strict=True)
    )
    parameters = (first.model_copy(update=of_the_first), *others)
    return trace.model_copy(update={"workload": trace.workload.model_copy(update={"parameters": parameters})})


def test_modules_are_launched_when_they_are_done_and_the_root_at_the_end_of_the_backward_pass():
    prediction = predict(decoder(), fabric(2), world_size=2, grouping="module")
    timeline = prediction.timeline
    assert prediction.buckets == ((3,), (2,), (1,), (0,))
    assert timeline.launched_ns[0].tolist() == [10, 20, 30, 45]


def test_fsdp_copies_parameters_before_forward_passes_and_gradients_twice_and_nothing_out():
    processor = Processor(pack=Linear(fixed_ns=1), copy_out=Linear(fixed_ns=2))
    costs = fabric(0).model_copy(update={"processor": processor})
    once = predict(decoder(), costs, world_size=2, grouping="module")
    assert once.iteration_ns == 45 + 7 + 4 * 2 + 4 * 2 * 1
    assert [step.kind for step in once.timeline.engine_input.schedule.steps].count("copy_out") == 0
    thrice = predict(decoder(), costs, world_size=2, grouping="module", sync_every=3)
    assert thrice.breakdown["copies"] == 3 * 4 * 2 + 4 * 2 * 1


@pytest.mark.parametrize(("dtype", "size_bytes"), [(None, 4), ("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_modules_are_reduced_in_the_reduce_dtype(dtype, size_bytes):
    schedule = build_schedule(Policy(grouping="module", reduce_dtype=dtype), recorded_model(decoder()))
    assert messages_of(schedule) == [("all_reduce", size_bytes)] * 4


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (decoder(sparse=True), "grouping: expected no sparse gradients, .* got that of embedding.weight"),
        (decoder(names=("a.weight", "b.weight", "c.weight", "d.weight")), "grouping: expected names of parameters"),
        (
            decoder(names=("layers.0.a", "layers.0.b", "c", "d"), dtype="float64"),
            "grouping: expected one dtype in each module, as FSDP2 does, got float32 and float64 with layers.0.a",
        ),
    ],
)
def test_models_that_fsdp_does_not_take_are_named(trace, message):
    with pytest.raises(ValueError, match=message):
        predict(trace, FABRIC, world_size=2, grouping="module")
