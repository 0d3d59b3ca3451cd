"""Plan: knee and limit are those of an exhaustive sweep, and bands contain their values."""

import json
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator import Fabric, predict, sweep, tune
from ddplab.simulator.capacity.limits import CURES, FASTEST_LINKS, MOST_OF_IT, NEGLIGIBLE
from ddplab.simulator.capacity.plan import plan
from ddplab.simulator.capacity.scaling import LEAST_GAIN, Price
from ddplab.simulator.catalogue import load_fabric
from ddplab.simulator.schedule.policy import Policy
from ddplab.simulator.workload.roofline import built_in_operations, find_device
from ddplab.simulator.workload.trace_synthesis import synthesize, with_batch
from ddplab.simulator.workload.variation import RECORDED, Straggler, Variation

from ..explore import examples
from ..strategies import iteration, rate_fabrics, trace_of, traces
from .changed_traces import with_parameters

SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 8, 16, 64, 1024, 16_384]), min_size=1, max_size=5, unique=True)


def resnet(device="a100-40gb-tf32", **measured):
    return synthesize(built_in_operations("resnet50-224"), find_device(device), **measured)


def knee_of_table(table):
    """The knee by its definition, from the throughputs of a table: computed apart from `Scaling.knee`."""
    rows = table.sort_values("world_size").to_dict("records")
    per_ns = [row["world_size"] / max(1, row["iteration_ns"]) for row in rows]
    for place in range(len(rows) - 1):
        added = (per_ns[place + 1] - per_ns[place]) / per_ns[place]
        share = (rows[place + 1]["world_size"] - rows[place]["world_size"]) / rows[place]["world_size"]
        if added / share < LEAST_GAIN * (1 - 1e-12):
            return rows[place]["world_size"]
    return None


@examples(12)
@given(traces(), rate_fabrics(), SIZES, st.booleans())
def test_the_knee_is_that_of_an_exhaustive_sweep(trace, fabrics, world_sizes, spread):
    variation = Variation(device_spread=0.02) if spread else RECORDED
    named = {f"fabric {number}": fabric for number, fabric in enumerate(fabrics)}
    table = sweep(trace, named, world_sizes=world_sizes, variation=variation, n_jobs=1)
    result = plan(trace, named, world_sizes=world_sizes, variation=variation)
    for one in result.systems:
        of_fabric = table[table["fabric"] == one.name]
        assert one.scaling.knee.world_size == knee_of_table(of_fabric)
        found = [offer.size.prediction.iteration_ns for offer in one.offers]
        assert found == of_fabric.sort_values("world_size")["iteration_ns"].tolist()


@examples(12)
@given(traces(), rate_fabrics(), st.sampled_from([2, 3, 8, 1024]), st.sampled_from([25.0, 1e-4, inf]))
def test_the_limit_is_that_of_an_exhaustive_sweep(trace, fabrics, world_size, cap_mb):
    """One fabric of the sweep for each thing that may limit, with that thing removed."""
    fabric = fabrics[0]
    without = {
        "now": fabric,
        "rate": fabric.with_links(rates=FASTEST_LINKS),
        "latency": fabric.with_links(latencies=1 / FASTEST_LINKS),
        "copies": fabric.with_processor(pack=Fabric.from_alpha_beta(0, 1).processor.pack),
        "launches and stalls": fabric.with_processor(launch_ns=0, stall_ns=0),
    }
    table = sweep(trace, without, world_sizes=[world_size], bucket_caps_mb=[cap_mb], n_jobs=1)
    times = dict(zip(table["fabric"], table["iteration_ns"], strict=True))
    saved = {name: max(0, times["now"] - ns) for name, ns in times.items() if name != "now"}
    (one,) = plan(trace, fabric, world_sizes=[world_size], bucket_cap_mb=cap_mb).systems
    assert {name: one.limits.saved_ns[name] for name in saved} == saved
    assert {name for name in CURES if one.limits.saved_ns[name]} <= saved.keys()
    largest = max(saved, key=lambda name: saved[name])
    if saved[largest] <= NEGLIGIBLE * times["now"]:
        assert one.limits.limit == "computation"
    elif one.limits.limit.endswith("bucket"):
        assert largest in ("rate", "latency")
        assert one.limits.saved_ns[one.limits.limit] >= MOST_OF_IT * saved[largest]
    else:
        assert one.limits.limit == largest


def test_a_bucket_that_nothing_hides_is_the_limit():
    """The large bucket is launched at the end, or waits for a small gradient."""
    fabric = Fabric.from_table([(2, 0, 0), (2, 1000, 2000)])
    late = trace_of([[iteration(100, (900, 890), 900, 0)]], (900, 10))
    (last,) = plan(late, fabric, world_sizes=[2], plan=((1,), (0,))).systems
    assert last.limits.limit == "last bucket"
    waits = trace_of([[iteration(100, (900, 895, 850, 100), 900, 0)]], (10, 10, 20, 380))
    (first,) = plan(waits, fabric, world_sizes=[2], bucket_cap_mb=400 / 2**20).systems
    assert first.limits.limit == "first bucket"
    hidden = trace_of([[iteration(100, (900, 100), 900, 0)]], (1, 300))
    (none,) = plan(hidden, fabric, world_sizes=[2], plan=((1,), (0,))).systems
    assert none.limits.limit == "computation"


def test_a_slow_rank_and_slow_launches_are_limits():
    trace = trace_of([[iteration(100, (500, 300), 500, 0)]], (8, 8))
    fabric = Fabric.from_alpha_beta(1, 1e12)
    (slow,) = plan(trace, fabric, world_sizes=[2], stragglers=[Straggler(rank=1, factor=2.0)]).systems
    assert slow.limits.limit == "stragglers"
    (host,) = plan(trace, fabric.with_processor(launch_ns=200), world_sizes=[2], bucket_cap_mb=1e-6).systems
    assert host.limits.limit == "launches and stalls"


@examples(12)
@given(st.integers(0, 20), st.integers(20, 400), st.floats(0.3, 0.95))
def test_needs_are_the_least_that_reach_the_target(latency_us, mb_per_s, target):
    us = 1000
    trace = trace_of([[iteration(300 * us, (1900 * us, 900 * us), 1900 * us, 100 * us)]], [3 << 14, 2 << 14])
    fabric = Fabric.from_alpha_beta(latency_us * us, mb_per_s * 1e6)
    (one,) = plan(trace, fabric, world_sizes=[4], efficiency=target).systems
    needs = one.needs

    def efficiency(fabric=fabric, trace=trace, **settings):
        return predict(trace, fabric, world_size=4, **settings).efficiency

    if needs.rate.multiple is not None:
        assert efficiency(fabric.with_links(rates=needs.rate.multiple)) >= target
    if needs.latency is not None:
        assert efficiency(fabric.with_links(latencies=needs.latency)) >= target
    if needs.batch is not None:
        assert efficiency(trace=with_batch(trace, needs.batch)) >= target
    if needs.accumulated is not None:
        assert efficiency(sync_every=needs.accumulated) >= target * (1 - 1e-4), "times are rounded"
        assert needs.accumulated == 1 or efficiency(sync_every=needs.accumulated - 1) < target
    else:
        assert efficiency(sync_every=64) < target * (1 + 1e-4)


def test_bands_contain_their_values_and_efficiency_hardly_depends_on_the_speed_of_the_data_sheet():
    """A step that takes six times as long has a higher efficiency: both change together."""
    trace = resnet()
    result = plan(trace, {"p4d": load_fabric("aws-p4d")}, world_sizes=[8, 64, 512])
    for offer in result.offers:
        size = offer.size
        least, most = size.prediction.efficiency_interval
        assert least <= size.prediction.efficiency <= most <= 1
        assert size.samples_per_s_band[0] <= size.samples_per_s <= size.samples_per_s_band[1]
    (slow, fast), prediction = result.offers[0].size.samples_per_s_band, result.offers[0].size.prediction
    least, most = prediction.efficiency_interval
    assert 1.3 < fast / slow < 1.6
    assert most / least < 1.1
    assert result.systems[0].next_measurement.world_sizes
    assert "compute times" in result.systems[0].sensitivity


def test_measured_iterations_narrow_the_band_and_move_the_computation_too():
    trace, fabric = resnet(), load_fabric("aws-p4d")
    (before,) = plan(trace, fabric, world_sizes=[8, 64]).offers[1:]
    (after,) = plan(trace, fabric, world_sizes=[8, 64], measured={8: 98_000_000}).offers[1:]
    low, high = after.size.samples_per_s_band
    assert high / low < before.size.samples_per_s_band[1] / before.size.samples_per_s_band[0]
    assert after.size.prediction.efficiency > 0.7, "the GPU is slower, not the network"


def test_two_sizes_to_measure_narrow_the_band_as_announced():
    trace, fabric = resnet(step_ns=100_000_000), load_fabric("aws-p4d")
    (one,) = plan(trace, fabric, world_sizes=[8, 16, 32, 64]).systems
    advice = one.next_measurement
    system = one.scaling.system
    measured = {ranks: system.at(ranks).iteration_ns for ranks in advice.world_sizes}
    again = plan(trace, fabric, world_sizes=[64], measured=measured).offers[0].size.prediction
    width = (again.interval_ns[1] - again.interval_ns[0]) / 2 / again.iteration_ns
    assert width == pytest.approx(advice.width_with_sizes, rel=1e-6)
    assert width < advice.width
    assert max(advice.world_sizes) <= 8, "one node"
    assert advice.width_with_messages is None, "64 GPUs are more than the buyer has"


def test_every_field_of_the_json_is_flat_or_named_and_survives_a_round_trip():
    trace = trace_of([[iteration(1000, (9000, 5000), 9000, 100)]], (8000, 4000))
    fabrics = {name: Fabric.from_alpha_beta(100, rate) for name, rate in (("slow", 1e9), ("fast", 1e10))}
    about = {"currency": "USD", "source": "a test", "date": "2026-01-01"}
    prices = [Price(system=name, per_gpu_hour=1.0, **about) for name in fabrics]
    result = plan(
        trace, fabrics, world_sizes=[8, 16], batch=1, samples=1e11, deadline_hours=30, budget=1e6, prices=prices
    )
    document = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert document == result.to_json()
    assert [(row["system"], row["world_size"]) for row in document["sizes"]] == [
        (name, size) for name in fabrics for size in (8, 16)
    ]
    for row in document["sizes"]:
        assert not any(isinstance(value, dict | list) for value in row.values())
        assert row["hours_low"] <= row["hours"] <= row["hours_high"]
        assert row["cost"] == pytest.approx(row["hours"] * row["world_size"])
    assert any(row["on_front"] for row in document["sizes"])
    assert [one["system"] for one in document["systems"]] == list(fabrics)


def test_strong_scaling_has_one_total_batch():
    trace = resnet(step_ns=64_000_000)
    fabric = Fabric.from_alpha_beta(0, 1e15)
    result = plan(trace, fabric, world_sizes=[1, 2, 128], assume=False, total_batch=64)
    one, two, many = map(result.systems[0].scaling.strong_samples_per_s, (1, 2, 128))
    assert two == pytest.approx(2 * one, rel=0.02)
    assert many is None, "fewer samples than GPUs"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"world_sizes": []}, "at least one number of GPUs"),
        ({"deadline_hours": 1.0}, "deadline_hours: expected `samples`"),
        ({"samples": 1e6, "budget": 1.0}, "budget: expected a price of every system"),
        ({"efficiency": 1.5}, "efficiency"),
        ({"optimizer": "lion"}, "optimizer"),
    ],
)
def test_a_wrong_question_is_one_line(wrong, message):
    trace = trace_of([[iteration(100, (500,), 500, 0)]], (8,))
    with pytest.raises(ValueError, match=message) as error:
        plan(trace, Fabric.from_alpha_beta(0, 1e9), **{"world_sizes": [2], **wrong})
    assert "\n" not in str(error.value)


def test_hooks_that_refuse_sparse_gradients_are_no_change_of_settings():
    trace = trace_of([[iteration(100, (500, 300), 500, 0)]], (8, 8))
    trace = with_parameters(trace, sparse=[True, False])
    (one,) = plan(trace, Fabric.from_alpha_beta(10, 1e9), world_sizes=[2]).systems
    assert {change.name for change in one.changes} == {"best buckets", "accumulate 4"}


def test_traces_and_fabrics_of_several_systems_have_the_same_names():
    trace = trace_of([[iteration(100, (500,), 500, 0)]], (8,))
    fabric = Fabric.from_alpha_beta(0, 1e9)
    with pytest.raises(ValueError, match="expected the names of the fabrics"):
        plan({"a": trace}, {"b": fabric}, world_sizes=[2])
    assert [one.name for one in plan({"a": trace, "b": trace}, fabric, world_sizes=[2]).systems] == ["a", "b"]
    with pytest.raises(ValueError, match="expected one system"):
        plan({"a": trace, "b": trace}, fabric, world_sizes=[2], measured={2: 100})


def test_the_best_buckets_are_those_of_tune_whatever_buckets_the_policy_has():
    trace = trace_of([[iteration(100, (500, 300), 500, 0)]], (8, 8))
    policy = Policy(plan=((0, 1),))
    (one,) = plan(trace, Fabric.from_alpha_beta(10, 1e9), world_sizes=[2], policy=policy).systems
    found = tune(trace, Fabric.from_alpha_beta(10, 1e9), world_size=2)
    assert one.limits.best_buckets().buckets == found.buckets
    assert {change.name: change.iteration_ns for change in one.changes}["best buckets"] == found.iteration_ns
    assert found.iteration_ns < one.scaling.sizes[0].prediction.iteration_ns


@pytest.mark.parametrize("samples", [1, 10**9])
def test_what_is_said_of_a_run_is_said_of_the_shortest(samples):
    """One sample takes an iteration, which more GPUs do not shorten."""
    made = plan(resnet(), load_fabric("aws-p4d"), world_sizes=[8, 64, 512], samples=samples)
    assert made.verdict.offer.hours == min(offer.hours for offer in made.offers)
    assert made.verdict.offer.size.world_size == (8 if samples == 1 else 512)
