"""Default costs of GPUs, assumed where the user gave none."""

import pytest

from ddplab import emulate
from ddplab.simulator import Fabric, Variation, predict, sweep
from ddplab.simulator.capacity.judgement import width_sentence
from ddplab.simulator.catalogue import read_catalogue
from ddplab.simulator.fabric import Processor
from ddplab.simulator.fabric.processor_costs import HookCost
from ddplab.simulator.inputs_with_default_costs import (
    DEVICE_SPREAD,
    GRAPH_LAUNCH_NS,
    LAUNCH_NS,
    NOT_IN_RANGES,
    SLOW_DOWN,
    STALL_NS,
    assume_gpu,
    default_processor,
    memory_of,
)

from .changed_traces import gpu_trace, with_workload

FREE = Fabric.from_alpha_beta(alpha_ns=0, bytes_per_s=1e18)


@pytest.mark.parametrize(
    ("name", "gb_per_s"),
    [
        ("Tesla V100-SXM2-32GB", 900),
        ("NVIDIA A100-PG509-200", 1555),
        ("NVIDIA A100-SXM4-80GB", 2039),
        ("NVIDIA A100 SXM 80GB, bf16 by its roofline", 2039),
        ("NVIDIA H100 80GB HBM3", 3350),
        ("NVIDIA GH200 480GB", 4000),
        ("Tesla T4", 320),
        ("AMD Instinct MI300X", 5300),
        ("Intel(R) Xeon(R) Platinum 8481C", None),
        ("Quadro T400", None),
        ("unknown", None),
    ],
)
def test_a_gpu_is_found_by_its_name(name, gb_per_s):
    assert memory_of(name) == (None if gb_per_s is None else gb_per_s * 1e9)


def test_on_a_gpu_copies_launches_and_slow_devices_are_not_free():
    """On a network that costs nothing, 16 buckets used to be as fast as one; now each costs a launch."""
    trace = gpu_trace("NVIDIA A100-PG509-200")
    fabric, variation, sentences = assume_gpu(trace, FREE, Variation())
    assert variation.device_spread == DEVICE_SPREAD
    assert len(sentences) == 2
    equal = Variation(device_spread=0)
    many, one = (predict(trace, fabric, world_size=8, bucket_cap_mb=cap, variation=equal) for cap in (1, 100))
    assert many.iteration_ns - one.iteration_ns == 15 * (LAUNCH_NS + 3 * STALL_NS)
    assert one.iteration_ns > one.compute_ns + LAUNCH_NS


@pytest.mark.parametrize(("gb_per_s", "may_be_slow"), [(20, True), (100, False)])
def test_beside_all_reduces_through_the_host_computation_may_be_several_times_slower(tmp_path, gb_per_s, may_be_slow):
    pod = tmp_path / "pod.yaml"
    bus, nic = f"{{members: 4, latency_us: 3, gb_per_s: {gb_per_s}}}", "{of: bus, latency_us: 9, gbit_per_s: 99}"
    pod.write_text(f"levels:\n  bus: {bus}\n  nic: {nic}\n")
    size, trace = 2**30, gpu_trace("NVIDIA A100-PG509-200")
    table = Fabric.from_table([(2, size, round(size / gb_per_s)), (2, 8, 9_000)])
    for given in (table, Fabric.load(pod)):
        fabric, _, sentences = assume_gpu(trace, given)
        assert fabric.processor.slow_down == SLOW_DOWN
        assert (fabric.processor.slowed(1).slow_down > 4) == may_be_slow
        assert any("less than PCIe's rate" in one for one in sentences) == may_be_slow
    for free in (
        Fabric.from_table([(2, 1, 0), (2, size, 0)]),
        Fabric.from_table([(2, 0, 9_000)]),
        Fabric.from_table([(2, 2**20, 60_000)]),
    ):  # the time of a small message is not for its bytes
        assert assume_gpu(trace, free).fabric.processor.slowed(1).slow_down < 2
    network = Fabric.from_alpha_beta(alpha_ns=9_000, bytes_per_s=1e10)  # of any number of nodes
    assert assume_gpu(trace, network).fabric.processor.slowed(1).slow_down < 2


def test_the_bandwidth_of_a_traces_memory_counts_more_than_the_name_of_its_gpu():
    """A GPU that no table names, as recorded, got no costs at all."""
    for name in ("NVIDIA X100", "NVIDIA A100-PG509-200"):
        trace = with_workload(gpu_trace(name), memory_bytes_per_s=1e12)
        fabric, _, _ = assume_gpu(trace, FREE, Variation())
        assert fabric.processor == default_processor(1e12)


def test_costs_that_were_measured_on_a_gpu_take_the_place_of_the_usual_ones():
    measured = read_catalogue().devices["h200"].costs.processor
    fabric, _, (sentence, _) = assume_gpu(gpu_trace("NVIDIA H200"), FREE, Variation())
    usual, found = default_processor(4.8e12), fabric.processor
    for name in type(found).model_fields:
        source = measured if name in measured.model_fields_set else usual
        assert getattr(found, name) == getattr(source, name), name
    assert found.stall_ns == STALL_NS  # one GPU waits for no other
    assert sentence.startswith("assumed as measured on one NVIDIA H200 SXM, because")
    own = (HookCost(name="noop"),)
    assert assume_gpu(gpu_trace("NVIDIA H200"), FREE.with_processor(hooks=own)).fabric.processor.hooks == own


def test_compute_times_that_were_not_measured_are_named_and_widen_the_interval():
    guessed = with_workload(gpu_trace("NVIDIA A100-PG509-200"), compute_bounds=(0.5, 3.0))
    assert "0.5 to 3 times as long" in assume_gpu(guessed, FREE, Variation()).sentences[-1]
    predicted = predict(guessed, FREE, world_size=8, assume=False)
    duration_ns = guessed.ranks[0].iterations[0].duration_ns
    assert predicted.interval_ns == (duration_ns // 2, duration_ns * 3)
    assert "compute times (100%); to narrow it, measure a step" in width_sentence(predicted.shares_of_width)


@pytest.mark.parametrize("settings", [{}, {"zero": "parameters"}, {"cuda_graph": True}], ids=str)
def test_every_door_completes_a_trace_of_a_gpu_in_the_same_way(settings):
    trace = gpu_trace("NVIDIA A100-PG509-200", size_bytes=2**14)  # emulation adds them up
    network = Fabric.from_alpha_beta(alpha_ns=5_000, bytes_per_s=1e8)
    fabric, variation, sentences = assume_gpu(trace, network, cuda_graph="cuda_graph" in settings)
    how = {"world_size": 4, "bucket_cap_mb": 1 / 16, **settings}
    explicit = predict(trace, fabric, variation=variation, assume=False, **how)
    predicted = predict(trace, network, **how)
    assert predicted == explicit
    assert predicted.assumed == sentences
    row = sweep(trace, network, world_sizes=[4], bucket_caps_mb=[1 / 16], n_jobs=1, **settings).iloc[0]
    assert (row["low_ns"], row["high_ns"]) == predicted.interval_ns
    emulated = emulate(trace, network, **how)
    assert (emulated.iteration_ns, emulated.assumed) == (predicted.iteration_ns, sentences)
    given = predict(trace, network, assume=False, **how)
    assert not given.assumed
    assert given.iteration_ns < predicted.iteration_ns


@pytest.mark.parametrize(("longest", "told"), [(1.1, False), (2.5, True)])
def test_a_long_iteration_of_few_recorded_ones_is_told_because_no_range_holds_it(longest, told):
    trace = gpu_trace("NVIDIA A100-PG509-200")
    usual = trace.ranks[0].iterations[0]
    long = usual.model_copy(update={"end_ns": usual.forward_start_ns + round(longest * usual.duration_ns)})
    ranks = (trace.ranks[0].model_copy(update={"iterations": (usual, usual, long)}),)
    _, _, sentences = assume_gpu(trace.model_copy(update={"ranks": ranks}), FREE)
    beginning = f"{NOT_IN_RANGES}: the longest of 3 recorded iterations takes {longest:.3g} times their median"
    assert any(one.startswith(beginning) for one in sentences) == told


def test_that_sparse_gradients_touch_all_rows_is_an_assumption():
    trace, network = gpu_trace("A100"), Fabric.from_alpha_beta(alpha_ns=5_000, bytes_per_s=1e10)
    parameters = tuple(one.model_copy(update={"sparse": True}) for one in trace.workload.parameters)
    sparse = with_workload(trace, parameters=parameters)
    usual, *more = (predict(sparse, network, world_size=8, **how).assumed for how in ({}, {"sparse_density": 1.0}))
    assert usual == (
        *more[0],
        f"not in the ranges: sparse gradients, such as that of {parameters[0].name}, are sent with all "
        "rows; give the part of them that a batch touches, such as --set sparse_density=0.01",
    )
    assert more == [predict(trace, network, world_size=8).assumed]


def test_a_graph_launches_in_the_gpus_time_and_does_not_vary():
    network = Fabric.from_alpha_beta(alpha_ns=5_000, bytes_per_s=1e10)
    eager, graph = (predict(gpu_trace("A100"), network, world_size=8, cuda_graph=one) for one in (False, True))
    assert eager.breakdown["launch"] - graph.breakdown["launch"] == len(graph.buckets) * (LAUNCH_NS - GRAPH_LAUNCH_NS)
    assert len(set(graph.samples_ns)) == 1 < len(set(eager.samples_ns))
    assert ["the iterations of one GPU by" in "".join(one.assumed) for one in (eager, graph)] == [True, False]
    assert ["a bucket 11 us" in "".join(one.assumed) for one in (eager, graph)] == [True, False]


def test_what_the_user_gave_is_not_replaced_by_assumptions(tmp_path):
    measured, free = FREE.with_processor(launch_ns=5), FREE.model_copy(update={"processor": Processor()})
    chosen = Variation(device_spread=0)
    for device in ("NVIDIA A100-PG509-200", "some processor"):
        for fabric in (measured, free):
            assert assume_gpu(gpu_trace(device), fabric, chosen) == (fabric, chosen, ())
            fabric.save(tmp_path / "fabric.json")
            assert assume_gpu(gpu_trace(device), Fabric.load(tmp_path / "fabric.json"), chosen).sentences == ()
    FREE.save(tmp_path / "fabric.json")
    assert assume_gpu(gpu_trace("A100"), Fabric.load(tmp_path / "fabric.json"), chosen).sentences
    assert assume_gpu(gpu_trace("some processor"), FREE, Variation()) == (FREE, Variation(), ())
