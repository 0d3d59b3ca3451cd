"""Schedules: which steps and collectives an iteration has, in which order, as the real reducer issues them."""

import pytest

from ddplab.reference.trace import Trace
from ddplab.simulator import Fabric, predict
from ddplab.simulator.fabric import Linear, Processor, Sharing

from ..strategies import iteration, trace_of
from .changed_traces import as_floats, with_parameters, with_workload
from .span_lines import ALIKE, fabric, lines_of

FABRIC = Fabric.from_alpha_beta(alpha_ns=100, bytes_per_s=1e9, concurrency=2)


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
