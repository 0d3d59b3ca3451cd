"""Terms of the model: what each adds, where its value comes from, and predictions without it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator import Fabric, Policy, Straggler, Topology, Variation, explain, predict
from ddplab.simulator.cost_terms import SLOW_RANKS, TERMS, TERMS_OF_PARTS, leave_out, origins
from ddplab.simulator.inputs_with_default_costs import complete
from ddplab.simulator.prediction import predicted

from ..explore import examples
from ..strategies import any_predictions
from .changed_traces import gpu_trace, with_iterations
from .test_nccl_cost_model import links
from .test_step_costs import recorded_with

GPU = "NVIDIA A100-PG509-200"
LINKS = Fabric(topology=Topology(levels=tuple(links(8, inside=2e11, network=4.5e10))))
TABLE = Fabric.from_table([(n, size, 30_000 + size // 50) for n in (8, 16) for size in (2**12, 2**20, 2**26)])


@examples(4)
@given(st.sampled_from([LINKS, TABLE]), st.sampled_from([8, 16]), st.lists(st.sampled_from(list(TERMS)), unique=True))
def test_a_term_adds_the_difference_to_the_prediction_without_it(fabric, world_size, left_out):
    trace, policy = gpu_trace(GPU, buffer_bytes=(4096,)), Policy(bucket_cap_mb=4)
    used = leave_out(left_out, complete(trace, fabric, policy=policy))

    def iteration_ns(inputs):
        return predict(
            trace,
            inputs.fabric,
            world_size=world_size,
            policy=inputs.policy,
            variation=inputs.variation,
            assume=False,
        ).iteration_ns

    effects = {
        one.term: one for one in explain(trace, fabric, world_size=world_size, policy=policy, without=left_out)
    }
    assert not set(effects) & set(left_out)
    for name, effect in effects.items():
        assert effect.adds_ns == iteration_ns(used) - iteration_ns(leave_out([name], used))
        assert effect.adds_ns >= 0
    assert sum(one.width for one in effects.values()) <= 1 + 1e-9


def test_all_terms_together_are_the_time_that_data_parallelism_adds():
    trace = gpu_trace(GPU, buffer_bytes=(4096,))
    bare = leave_out(TERMS, complete(trace, LINKS))
    without = predict(trace, bare.fabric, world_size=16, policy=bare.policy, variation=bare.variation, assume=False)
    assert without.iteration_ns == pytest.approx(trace.ranks[0].iterations[0].duration_ns, abs=10)
    assert [one.term for one in explain(trace, LINKS, world_size=16)] == [one for one in TERMS if one != "stragglers"]


@examples(20)
@given(any_predictions())
def test_parts_of_an_iteration_add_up_and_vanish_without_the_terms_that_they_come_from(asked):
    """What ranks compute cannot be left out; hooks, the search and the rebuild come from settings."""
    how = {"variation": asked.variation, "stragglers": asked.stragglers, "inputs": asked.inputs}
    inputs = complete(asked.trace, asked.fabric, policy=asked.policy, **how)
    prediction = predicted(inputs, asked.world_size)
    assert sum(prediction.breakdown.values()) == prediction.timeline.iteration_ns
    assert set(prediction.breakdown) - set(TERMS_OF_PARTS) == {"hook", "search", "rebuild"}
    for part, terms in TERMS_OF_PARTS.items():
        left = predicted(leave_out(terms, inputs), asked.world_size)
        rounding_ns = len(left.timeline.start_ns) * (part == "exposed_comm")
        assert terms == SLOW_RANKS or left.breakdown[part] <= rounding_ns


def test_a_slow_rank_that_was_given_is_a_term():
    slow = [Straggler(rank=3, factor=1.5)]
    (effect,) = [
        one for one in explain(gpu_trace(GPU), LINKS, world_size=8, stragglers=slow) if one.term == "stragglers"
    ]
    with_it, without = (predict(gpu_trace(GPU), LINKS, world_size=8, stragglers=some) for some in (slow, []))
    assert (effect.adds_ns, effect.origin) == (with_it.iteration_ns - without.iteration_ns, "described")
    assert effect.adds_ns > 0


def origins_on(trace, fabric, variation, world_size):
    return origins(complete(trace, fabric, variation=variation), world_size)


def test_each_value_says_where_it_comes_from():
    processor = ("copies", "launches", "stalls", "slow_downs")
    assumed = origins_on(gpu_trace(GPU, buffer_bytes=(4096,)), LINKS, Variation(), 16)
    assert assumed["computation"] == "measured"
    assert assumed["collectives"] == assumed["buffers"] == "described"
    assert {assumed[name] for name in (*processor, "device_spread", "jitter")} == {"assumed"}

    many = origins_on(gpu_trace(GPU, iterations=20), TABLE, Variation(), 16)
    assert (many["jitter"], many["collectives"], many["buffers"]) == ("measured", "measured", "none")
    further = origins_on(gpu_trace(GPU), TABLE.model_copy(update={"extrapolate": True}), Variation(), 12)
    assert further["collectives"] == "extrapolated"

    chosen = Variation(kind="slowest", device_spread=0.01, jitter=0.01)
    for fabric, origin in ((LINKS, "described"), (TABLE, "measured")):
        given = origins_on(gpu_trace(GPU, buffer_bytes=(4096,)), fabric.with_processor(launch_ns=5_000), chosen, 16)
        assert [given[name] for name in processor] == ["none", origin, "none", "none"]
        assert (given["device_spread"], given["jitter"]) == ("described", "described")
    nothing = origins_on(gpu_trace("some processor"), TABLE, Variation(), 16)
    assert [nothing[name] for name in processor] == ["none"] * 4


@pytest.mark.parametrize("ranks", [1, 2, 16])
@pytest.mark.parametrize("cap_mb", [2, 25])
def test_an_assumption_that_adds_nothing_is_not_listed(ranks, cap_mb):
    """Copies, launches and stalls that the recorded times contain were "assumed", with 0.00 ms."""
    trace, layout = gpu_trace(GPU), [range(15, -1, -1)]

    def with_copies_out(one):
        buckets = tuple(each.model_copy(update={"copied_out_ns": one.backward_end_ns + 1}) for each in one.buckets)
        return one.model_copy(update={"buckets": buckets})

    with_ddp = with_iterations(recorded_with(trace, layout), with_copies_out)
    for given_trace, is_bare in ((trace, True), (with_ddp, False)):
        shown = explain(given_trace, LINKS, world_size=ranks, policy=Policy(bucket_cap_mb=cap_mb))
        assert all(one.adds_ns or one.width for one in shown if one.origin == "assumed")
        assert ("copies" in {one.term for one in shown}) == is_bare
        assert ("launches" in {one.term for one in shown}) == (is_bare or cap_mb < 16)
        (sentence,) = [one for one in complete(given_trace, LINKS).assumed if "no processor costs" in one]
        assert ("copying a gradient" in sentence) == is_bare
        assert ("a bucket more than in the trace 11 us" in sentence.replace("takes ", "")) != is_bare


@pytest.mark.parametrize(("iterations", "origin"), [(1, "none"), (2, "measured")])
def test_the_variation_of_a_single_iteration_is_no_measured_one(iterations, origin):
    """The two ends of an interval of 90 % were equal to 0.01 %, and its jitter was called measured."""
    trace, on_gpu = (gpu_trace(device, iterations=iterations) for device in ("some processor", GPU))
    assert origins_on(trace, TABLE, Variation(), 16)["jitter"] == origin
    assert any("one iteration" in one for one in predict(trace, TABLE, world_size=16).assumed) == (iterations == 1)
    assert not any("one iteration" in one for one in complete(on_gpu, TABLE).assumed)  # there, jitter is assumed


def test_a_term_that_is_not_known_is_named():
    with pytest.raises(ValueError, match=r"expected some of collectives, .*; got latency"):
        explain(gpu_trace(GPU, buffer_bytes=(4096,)), LINKS, world_size=16, without=["latency"])
