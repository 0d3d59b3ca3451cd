"""Emulation: in virtual time real reducers take as long as `predict` says, to the nanosecond."""

import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddplab import simulator
from ddplab.emulation.emulate import emulate
from ddplab.reference.data_parallel import DistributedDataParallel
from ddplab.reference.errors import RankError
from ddplab.reference.trace import Buffer, Iteration
from ddplab.simulator.fabric import Linear
from ddplab.simulator.predicted_iteration import Prediction

from ..explore import examples
from ..simulator.changed_traces import as_floats, with_iterations, with_workload
from ..strategies import Asked, emulations, iteration, module_emulations, rate_fabrics, torch_emulations, trace_of
from .small_trace import FABRIC, small_trace

pytestmark = pytest.mark.usefixtures("soon")


def test_emulate_prints_no_difference_for_torchs_class_and_writes_json(printed, answered, topology, tmp_path):
    """With the usual caps, of which the last one is infinite."""
    trace = tmp_path / "small.json.gz"
    printed("synthesize", "--model", "small-tensors", "--out", trace)
    shown, document = answered("emulate", trace, "--fabric", topology, "--class", "torch", "--set", "iterations=9")
    assert "largest difference between emulated and predicted median iterations: 0 ns" in shown
    rows = document["rows"]
    assert [row["cap_mb"] for row in rows] == [0.5, 1.0, 5.0, "default", None]
    assert all(row["emulated_ns"] == row["predicted_ns"] for row in rows)


def assert_as_predicted(asked: Asked, reducer: str) -> tuple[Prediction, Prediction]:
    """To the nanosecond, with the same messages; returns what was emulated and what was predicted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about settings that do not go together
        real = emulate(
            asked.trace,
            asked.fabric,
            world_size=asked.world_size,
            reducer=reducer,
            policy=asked.policy,
            variation=asked.variation,
            stragglers=asked.stragglers,
            inputs=asked.inputs,
        )
    predicted = asked.predict()
    assert real.samples_ns == predicted.samples_ns
    sent, expected = (one.timeline.engine_input.schedule.collectives for one in (real, predicted))
    assert [one[2:] for one in sent] == [one[2:] for one in expected]
    return real, predicted


BUFFERS = tuple(
    Buffer(name=f"buffer{size}", dtype=dtype, size_bytes=size)
    for dtype, size in (("float32", 4), ("int64", 8), ("float32", 40), ("float64", 16))
)


@examples(60)
@given(emulations(), st.sampled_from([None, "first", "rebuild", "join"]))
def test_our_reducer_takes_the_predicted_time(asked, kind):
    """Most examples have buffers and buckets by caps, in an early iteration or under Join with unequal inputs."""
    if kind is not None:
        joins = kind == "join" or asked.inputs is not None
        policy = {"plan": None, "order": "ready", "broadcast_buffers": True, "cuda_graph": False}
        policy |= {"skip_all_reduce_unused_params": False, "zero": None} if joins else {}
        policy["phase"] = "steady" if joins else kind
        every, ranks = asked.policy.sync_every, range(1, asked.world_size + 1)
        asked = replace(
            asked,
            policy=asked.policy.model_copy(update=policy),
            trace=with_workload(asked.trace, source="module", buffers=BUFFERS),
            inputs=tuple(every * rank for rank in ranks) if joins else None,
        )
    real, predicted = assert_as_predicted(asked, "ddplab")
    assert real.buckets == predicted.buckets
    if len(real.timeline.engine_input.ranks) == 1:  # the timeline of several ranks shows their waits in one order
        assert real.breakdown == predicted.breakdown
        assert real.critical_buckets == predicted.critical_buckets
    if asked.trace.workload.source == "module":  # otherwise the emulated reducer never sends buffers
        assert real.epoch_end_ns == predicted.epoch_end_ns


@examples(10)
@given(torch_emulations())
def test_torchs_reducer_takes_the_predicted_time(asked):
    real, predicted = assert_as_predicted(asked, "torch")
    assert real.buckets in ((), predicted.buckets)  # torch does not tell the buckets that are never rebuilt


@examples(4)
@given(torch_emulations(), rate_fabrics(), st.sampled_from(["parameters", "buckets"]), st.integers(1, 40))
def test_torchs_sharded_optimizer_broadcasts_as_predicted_under_both_classes(asked, fabrics, zero, world_size):
    policy = asked.policy.model_copy(update={"zero": zero})
    update = {"stragglers": (), "inputs": None, "world_size": world_size, "policy": policy}
    asked = replace(asked, **update, trace=with_iterations(asked.trace, _with_optimizer))
    free = fabrics[0].with_processor(launch_ns=0, pack=Linear())
    for reducer, fabric in (("ddplab", fabrics[0]), ("torch", free)):
        assert_as_predicted(replace(asked, fabric=fabric), reducer)


def _with_optimizer(one: Iteration) -> Iteration:
    """The iteration with all after the backward pass as optimiser."""
    return one.model_copy(update={"optimizer_start_ns": one.backward_end_ns, "optimizer_end_ns": one.end_ns})


def test_a_reducer_that_behaves_differently_takes_another_time():
    class InForwardOrder(DistributedDataParallel):
        def __init__(self, module, **_):
            super().__init__(module, plan=[[0], [1], [2]])

    arguments = {"world_size": 2, "bucket_cap_mb": 1e-3}
    other = emulate(small_trace(), FABRIC, reducer=InForwardOrder, **arguments)
    assert other.iteration_ns > simulator.predict(small_trace(), FABRIC, **arguments).iteration_ns
    assert other.buckets == ((0,), (1,), (2,))


@examples(8)
@given(module_emulations())
def test_replicate_built_on_fsdp_takes_the_predicted_time(asked):
    real, predicted = assert_as_predicted(asked, "replicate")
    assert len(real.timeline.done_ns) == len(predicted.buckets)
    assert real.timeline.done_ns.tolist() == predicted.timeline.done_ns.tolist()


def test_a_module_whose_gradients_become_ready_between_others_is_named():
    trace = trace_of([[iteration(500, (3000, 1000, 2000), 3500, 700)]], [4, 4, 4])
    trace = as_floats(trace, name=["layers.0.a", "layers.0.b", "layers.1.a"])
    with pytest.raises(RankError, match=r"expected no other gradient between those of layers\.0"):
        emulate(trace, FABRIC, world_size=2, reducer="replicate", grouping="module")


def test_emulate_says_what_predict_says_of_the_trace(printed, fabric, tmp_path):
    """That the GPU waited for its host was not said beside emulated times."""
    trace = small_trace()
    (rank,) = trace.ranks
    waiting = tuple(one.model_copy(update={"host_bound_ns": one.duration_ns // 2}) for one in rank.iterations)
    trace.model_copy(update={"ranks": (rank.model_copy(update={"iterations": waiting}),)}).save(tmp_path / "t.json")
    for sizes in ("2", "2,4"):
        told = printed("predict", tmp_path / "t.json", "--fabric", fabric, "--caps", "default", "--world-size", sizes)
        assert "\nthe trace is host-bound: its GPU waited for its host 50% of the time" in told
    emulated = printed("emulate", tmp_path / "t.json", "--fabric", fabric, "--caps", "default")
    assert "\nthe trace is host-bound: its GPU waited for its host 50% of the time" in emulated


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reducer": "horovod"}, "reducer: expected ddplab, torch, replicate or a class, got 'horovod'"),
        ({"reducer": "torch", "grouping": "module"}, "reducer: expected 'replicate' with grouping='module'"),
        ({"reducer": "replicate"}, "grouping: expected 'module' with the reducer 'replicate'"),
        ({"reducer": "replicate", "grouping": "module"}, "grouping: expected names of parameters that show the"),
        ({"reducer": torch.nn.Linear}, "reducer: expected a class with the constructor of torch's"),
        ({"reducer": "torch", "order": "forward"}, "order: expected 'ready' and no plan"),
        ({"grouping": "fusion"}, "grouping: expected 'buckets', because ddplab's reducer copies every gradient"),
        ({"inputs": [1, 2], "zero": "buckets"}, "inputs: expected None with zero"),
        ({"inputs": [1, 2], "cuda_graph": True}, "inputs: expected None with cuda_graph"),
        ({"phase": "first", "cuda_graph": True}, "cuda_graph: expected a steady iteration"),
        ({"reducer": "replicate", "grouping": "module", "zero": "buckets"}, "zero: expected the default with group"),
        ({"inputs": [1, 2], "phase": "first"}, "phase: expected 'steady' with inputs, got 'first'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        emulate(small_trace(), FABRIC, world_size=2, **arguments)
