"""Schedules: which steps and collectives an iteration has, in which order, as the real reducer issues them."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.bucketing import ORDERS, bucket_caps, plan_buckets
from reference.trace import Trace
from simulator import Fabric, predict
from simulator.fabric import Linear, Processor, Sharing
from simulator.schedule.comm_hook_messages import PowerSGD
from simulator.schedule.policy import Phase, Policy
from simulator.schedule.schedule import Compute, LaunchCollective, buckets_of, build_join_end, build_schedule
from simulator.workload.compute_times import recorded_model

from ..explore import examples
from ..strategies import caps_mb, integer_programs, iteration, partitions, trace_of, traces
from . import hook_cost_bodies
from .changed_traces import as_floats, with_parameters, with_workload
from .span_lines import ALIKE, fabric, lines_of

FABRIC = Fabric.from_alpha_beta(alpha_ns=100, bytes_per_s=1e9, concurrency=2)
PHASES: tuple[Phase, ...] = ("first", "rebuild", "steady", "steady")
STATIC_PHASES: tuple[Phase, ...] = ("first", "second", "rebuild", "steady")
PROGRAMS = integer_programs(2, ["train"] * 4)
CAPS = st.fixed_dictionaries({"bucket_cap_mb": caps_mb()}) | st.fixed_dictionaries(
    {"bucket_cap_mb_list": st.lists(st.floats(1e-6, 3e-4), min_size=1, max_size=3)}
)

MODES = st.sampled_from(
    [
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"static_graph": True, "find_unused_parameters": True},
    ]
)


def predicted_messages(
    trace: Trace, phase: Phase, world_size: int = 2, *, joins: bool = False, **settings: Any
) -> hook_cost_bodies.Cycle:
    """Transport and bytes of every collective of each iteration of a cycle, in order."""
    model = recorded_model(trace, unused_allowed=True)
    policy = Policy(phase=phase, **settings)
    schedule = build_schedule(policy, model, joins=joins)
    sent = [[]]
    for instruction in schedule.instructions:
        if isinstance(instruction, LaunchCollective):
            sent[-1].append(schedule.collectives[instruction.collective][2:])
        elif isinstance(instruction, Compute) and instruction.kind == "unsynchronized":
            sent.append([])
    return sent


def assert_predicted(results: list, settings: dict[str, Any], phases: tuple[Phase | None, ...] = PHASES) -> None:
    """Every rank issued the predicted collectives; the trace is rank 0's, whose ready order decides the buckets."""
    trace = results[0][0]
    for _, seen, *_ in results:
        for phase, sent in zip(phases, seen, strict=True):
            assert phase is None or sent == predicted_messages(trace, phase, len(results), **settings)


@examples(40)
@given(PROGRAMS, CAPS, MODES, st.booleans(), st.integers(1, 3), st.data())
def test_iterations_issue_the_schedules_collectives(two_ranks, program, caps, mode, buffers, sync_every, data):
    """First with one bucket, then with the rebuild's broadcast, then in rebuilt buckets; buffers by dtype.

    A plan is never rebuilt. With `find_unused_parameters` each iteration ends with the bitmap. A static graph sends
    it once; its first iteration does not tell the order, so the second runs in the buckets of the first. A cycle
    under `no_sync` sends what one iteration does.
    """
    is_static = mode.get("static_graph", False)
    if not is_static and data.draw(st.booleans()):
        caps = {"plan": data.draw(partitions(len(program.weights), [weight.dtype for weight in program.weights]))}
    body = partial(hook_cost_bodies.of_integers, sync_every=1 if is_static else sync_every)
    results = two_ranks.run(body, program, caps | mode | {"forward_sync_buffers": buffers})
    settings = caps | mode | {"broadcast_buffers": buffers, **body.keywords}
    assert_predicted(results, settings, STATIC_PHASES if is_static else PHASES)
    if mode == {"find_unused_parameters": True}:
        assert all(cycle[-1][-1] == ("all_reduce", 4 * len(program.weights)) for cycle in results[0][1])


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


@pytest.mark.parametrize("buffers", [True, False])
@pytest.mark.parametrize("sync_every", [1, 3])
def test_under_join_ranks_also_agree_on_whose_buffers_count_and_whether_any_averages(two_ranks, buffers, sync_every):
    """And at its end on whose model all get."""
    body = partial(hook_cost_bodies.under_join, sync_every=sync_every)
    results = two_ranks.run(body, (4 * sync_every,) * 2, {"forward_sync_buffers": buffers})
    settings = {"bucket_cap_mb": None, "broadcast_buffers": buffers, "sync_every": sync_every}
    assert_predicted(results, settings | {"joins": True})
    trace, _, end = results[0]
    schedule = build_join_end(Policy(**settings), recorded_model(trace))
    assert [collective[2:] for collective in schedule.collectives] == end


@given(traces(), caps_mb(), st.sampled_from(ORDERS))
def test_buckets_are_those_of_the_reducers_own_rule(trace, cap, order):
    expected = plan_buckets(
        order, trace.sizes_bytes, bucket_caps(cap), ready_order=recorded_model(trace).ready_order, keys=trace.keys
    )
    prediction = predict(trace, FABRIC, world_size=2, bucket_cap_mb=cap, order=order)
    assert prediction.buckets == tuple(map(tuple, expected))
    assert buckets_of(Policy(bucket_cap_mb=cap, order=order), recorded_model(trace)) == expected


def costs(**processor) -> dict[str, Processor]:
    return {"processor": Processor(**processor)}


COPIES = costs(copy_out=Linear(fixed_ns=3))
PACKING = costs(pack=Linear(fixed_ns=1), launch_ns=2)
TURNED = iteration(forward_ns=10, ready_ns=(20, 30), backward_end_ns=32, step_ns=5)
UNUSED = iteration(forward_ns=10, ready_ns=(30, None), backward_end_ns=32, step_ns=5)
LATE = iteration(forward_ns=20, ready_ns=(40, 30), backward_end_ns=42, step_ns=5)


@pytest.mark.parametrize(
    ("ranks", "buckets", "costs", "settings", "expected"),
    [
        # Communication hides behind the backward pass, and the rest is exposed.
        (
            [ALIKE], [[1], [0]], {}, {},
            ["  0- 10 forward", " 10- 20 backward 0", " 20- 28 all_reduce 0", " 20- 30 backward 1",
             " 30- 38 all_reduce 1", " 30- 32 backward", " 32- 38 wait 1", " 38- 43 step"],
        ),
        # A collective starts when its last rank has launched it.
        ([ALIKE, LATE], [[0, 1]], {}, {}, [" 30- 40 straggler 0", " 32- 48 wait 0", " 40- 48 all_reduce 0"]),
        # Two at a time may each be slower.
        (
            [ALIKE], [[0], [1]], {"concurrency": 2, "sharing": (Sharing(size_bytes=0, factor=1.5),)}, {},
            [" 30- 42 all_reduce 0", " 30- 42 all_reduce 1"],
        ),
        # Bucket 0 is launched at 20 and takes 8; meanwhile computation progresses by 4, so the rest is 4 late.
        ([ALIKE], [[1], [0]], costs(slow_down=2.0), {}, [" 20- 34 backward 1", " 34- 42 all_reduce 1"]),
        # Averages are copied out, but not those in views.
        ([ALIKE], [[0, 1]], COPIES, {}, [" 38- 44 copy_out 0"]),
        ([ALIKE], [[0, 1]], COPIES, {"gradient_as_bucket_view": True}, ["no copy_out 0"]),
        # Buffers are copied out when they have arrived, in 1 + 4 and 1 + 2.
        (
            [ALIKE], [[0, 1]], costs(copy_out=Linear(fixed_ns=1, ns_per_byte=1)), {"buffer_bytes": [4, 2]},
            [" 16- 24 copy_out", " 24- 34 forward"],
        ),
        ([ALIKE], [[0, 1]], COPIES, {"buffer_bytes": [4, 2], "broadcast_buffers": False}, ["  0- 10 forward"]),
        # Buffers, a piece for each dtype, at most two pieces at a time.
        (
            [ALIKE], [[0, 1]], {"concurrency": 3}, {"buffer_bytes": [4, 4, 4]},
            ["  0-  8 broadcast", "  0-  8 broadcast", "  8- 16 broadcast", " 16- 26 forward"],
        ),
        # Unused parameters are searched for, and count as ready with the first gradient. The map of them is added up,
        # and waited for before averages are copied out, because gradients that no rank used are not.
        (
            [UNUSED], [[1], [0]], costs(search_ns_per_parameter=2), {"find_unused_parameters": True},
            [" 10- 14 search", " 34- 42 all_reduce 0", " 36- 58 wait", " 42- 50 all_reduce 1", " 50- 58 bitmap",
             " 58- 63 step", "no rebuild"],
        ),
        # Where all parameters are used, the map is waited for last.
        (
            [ALIKE], [[0, 1]], costs(copy_out=Linear(fixed_ns=1)), {"find_unused_parameters": True},
            [" 38- 40 copy_out 0", " 40- 46 wait", " 46- 51 step"],
        ),
        # The rebuild comes before the second forward pass.
        (
            [ALIKE], None, costs(rebuild_ns=3), {"phase": "rebuild"},
            ["  0-  8 order", "  8- 11 rebuild", " 11- 21 forward"],
        ),
        # Iterations under `no_sync` only compute, after the buffers, which are sent once a cycle.
        (
            [ALIKE], [[0, 1]], {}, {"sync_every": 2, "buffer_bytes": [4]},
            ["  0-  8 broadcast", "  8- 45 unsynchronized", " 75- 83 all_reduce 0"],
        ),
        # Under Join, ranks with inputs do not wait for the counts of ranks; those without wait for both.
        (
            [ALIKE, LATE], [[0, 1]], {}, {"sync_every": 3, "inputs": [3, 3]},
            ["  0- 37 unsynchronized", " 37- 74 unsynchronized", "no wait"],
        ),
        # A static graph packs all buckets before its first launch.
        (
            [ALIKE], [[1], [0]], PACKING, {"static_graph": True, "phase": "first"},
            [" 32- 34 pack 0", " 34- 36 launch 0", " 36- 38 launch 1"],
        ),
        # A bucket is packed when it is full. On rank 0, bucket 1 waits for rank 1, whose gradients come in another
        # order and which packs both buckets before its first launch.
        ([ALIKE, TURNED], [[1], [0]], PACKING, {}, [" 20- 21 pack 0", " 21- 23 launch 0", " 23- 34 straggler 0"]),
    ],
)  # fmt: skip
def test_spans_of_rank_0(ranks, buckets, costs, settings, expected):
    """All spans of the kinds that are expected; `no KIND`: there are none of this kind."""
    kinds = {line.removeprefix("no ") if line.startswith("no ") else line[8:] for line in expected}
    every = lines_of(ranks, buckets, fabric(8, **costs), **settings)
    lines = [line.replace(" rank 0", "") for line in every if "rank 0" in line]
    shown = [line for line in lines if line[8:] in kinds]
    assert shown == [line for line in expected if not line.startswith("no ")], lines


def test_two_dtypes_are_refused_where_torch_does():
    trace = with_parameters(trace_of([[ALIKE]], [4, 4]), dtype=["float32", "int8"], shape=[(1,), (4,)])
    with pytest.raises(ValueError, match="plan: expected one dtype per bucket, bucket 0 has float32 and int8"):
        predict(trace, fabric(8), world_size=2, plan=[[0, 1]])
    with pytest.raises(ValueError, match="zero: expected one dtype, as ZeroRedundancyOptimizer does, got float32"):
        predict(trace, fabric(8), world_size=2, zero="buckets")


def test_a_second_collective_follows_the_launch_of_the_next_bucket():
    trace = with_parameters(trace_of([[ALIKE]], [400, 400]), shape=[(20, 20)] * 2)
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
    trace = as_floats(trace_of([[iteration(5, (40, 30, 20, 10), 45, 7)]], [4] * 4), name=list(names))
    first, *others = trace.workload.parameters
    return with_workload(trace, parameters=(first.model_copy(update=of_the_first), *others))


def test_fsdp_copies_parameters_before_forward_passes_and_gradients_twice_and_nothing_out():
    processor = Processor(pack=Linear(fixed_ns=1), copy_out=Linear(fixed_ns=2))
    costs = fabric(0).model_copy(update={"processor": processor})
    once = predict(decoder(), costs, world_size=2, grouping="module")
    assert once.iteration_ns == 45 + 7 + 4 * 2 + 4 * 2 * 1
    assert [step.kind for step in once.timeline.engine_input.schedule.steps].count("copy_out") == 0
    thrice = predict(decoder(), costs, world_size=2, grouping="module", sync_every=3)
    assert thrice.breakdown["copies"] == 3 * 4 * 2 + 4 * 2 * 1


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
