"""The recorder: recorded times are right, and recording does not change the training."""

import subprocess
import sys
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ddplab.reference.recorder
from ddplab.reference.recorder import record
from ddplab.simulator.workload.compute_times import recorded_model

from ..scenarios import assert_same
from ..simulated_gpu import SimulatedGpu, SimulatedLayer
from . import recorder_bodies as bodies

WRAPPERS = ["ours", "torch", "module"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_recording_changes_no_gradient_and_every_rank_gets_the_whole_trace(two_ranks, wrapper):
    (first, *_), (second, *_) = results = two_ranks.run(bodies.record_training, wrapper, 4)
    for _, watched, unwatched in results:
        assert_same(watched, unwatched)
    assert first == second
    assert [len(rank.iterations) for rank in first.ranks] == [4, 4]
    workload = first.workload
    assert workload.source == {"ours": "ddplab"}.get(wrapper, wrapper)
    assert (workload.model, workload.world_size, workload.backend, workload.batch) == ("mlp", 2, "gloo", 4)
    assert [parameter.name for parameter in workload.parameters[:2]] == ["0.weight", "0.bias"]
    assert [parameter.shape for parameter in workload.parameters[:2]] == [(16, 8), (16,)]
    assert [parameter.size_bytes for parameter in workload.parameters[:2]] == [512, 64]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_moments_of_an_iteration_are_where_they_belong(two_ranks, wrapper):
    """Trace checks the order within an iteration; this test, that every moment of every iteration was recorded."""
    trace, *_ = two_ranks.run(bodies.record_training, wrapper, 4)[0]
    for rank in trace.ranks:
        for iteration in rank.iterations:
            assert all(moment is not None for moment in iteration.ready_ns)
            assert iteration.forward_start_ns < iteration.forward_end_ns <= iteration.backward_start_ns
            assert iteration.backward_end_ns < iteration.optimizer_start_ns < iteration.optimizer_end_ns
            assert iteration.ready_ns[4] < iteration.ready_ns[0]  # the last layer's gradient comes first
        for before, after in pairwise(rank.iterations):
            assert before.end_ns == after.forward_start_ns


@pytest.mark.parametrize("wrapper", ["ours", "torch"])
def test_buckets_are_seen_from_ready_to_done(two_ranks, wrapper):
    trace, *_ = two_ranks.run(bodies.record_training, wrapper, 4)[0]
    for rank in trace.ranks:
        for iteration in rank.iterations:
            layout = trace.layouts[iteration.layout]
            assert iteration.synchronized
            for indices, bucket in zip(layout, iteration.buckets, strict=True):
                assert bucket.ready_ns >= max(iteration.ready_ns[index] for index in indices)
                assert bucket.done_ns <= iteration.backward_end_ns
                assert (bucket.copied_out_ns is None) == (wrapper == "torch")
    # An all-reduce ends nowhere before its last rank has launched it, on one clock: as sure as the clocks are.
    offsets = [rank.clock_offset_ns for rank in trace.ranks]
    slack = 2 * max(rank.clock_uncertainty_ns for rank in trace.ranks)
    for same in zip(*(rank.iterations for rank in trace.ranks), strict=True):
        for times in zip(*(iteration.buckets for iteration in same), strict=True):
            launched = max(bucket.launched_ns + offset for bucket, offset in zip(times, offsets, strict=True))
            assert all(b.done_ns + o + slack >= launched for b, o in zip(times, offsets, strict=True))


def test_ours_and_torchs_rebuilt_layouts_are_the_same(two_ranks):
    ours, *_ = two_ranks.run(bodies.record_training, "ours", 4)[0]
    torchs, *_ = two_ranks.run(bodies.record_training, "torch", 4)[0]
    assert ours.layouts[ours.ranks[0].iterations[-1].layout] == torchs.layouts[torchs.ranks[0].iterations[-1].layout]


@pytest.mark.parametrize("wrapper", ["ours", "torch"])
def test_iterations_under_no_sync_say_so(two_ranks, wrapper):
    trace, *_ = two_ranks.run(bodies.record_training, wrapper, 4, 2)[0]
    for rank in trace.ranks:
        assert [iteration.synchronized for iteration in rank.iterations] == [False, True, False, True]
        assert all(None not in iteration.ready_ns for iteration in rank.iterations)
        assert [len(iteration.buckets) > 0 for iteration in rank.iterations] == [False, True, False, True]
        assert [iteration.optimizer_start_ns is None for iteration in rank.iterations] == [True, False, True, False]


@pytest.mark.parametrize(
    ("oddity", "iterations"),
    [
        ("a backward pass beside the output", 1),
        ("a comm hook that sends something else", 4),
        ("a forward pass without backward, then no_sync", 1),
        ("a bucket that is skipped", 3),
    ],
)
def test_an_unusual_script_keeps_its_recording(two_ranks, oddity, iterations):
    for trace in two_ranks.run(bodies.record_oddly, oddity):
        assert len(trace.ranks[0].iterations) == iterations


def test_two_recordings_at_once_see_their_buckets_and_print_nothing():
    """Each once registered a kernel of its own: torch warned, and called only the one registered last."""
    script = Path(__file__).parents[1] / "scripts" / "record_two_at_once.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_a_plain_module_is_recorded_without_a_process_group():
    module = nn.Linear(2, 1)
    with record(module) as recording:
        for _ in range(2):
            module(torch.ones(1, 2)).sum().backward()
    trace = recording.trace
    assert (trace.workload.model, trace.workload.backend, trace.layouts) == ("Linear", None, ())
    assert [iteration.synchronized for iteration in trace.ranks[0].iterations] == [False, False]


def test_recorded_buckets_are_those_of_the_parameters_that_are_not_ignored(two_ranks):
    for name in ("ours", "torch"):
        trace, _ = two_ranks.run(bodies.record_oddly, f"{name} that ignores a parameter")
        assert trace.layouts[-1] == ((2, 1, 0),)
        assert [len(iteration.buckets) for iteration in trace.ranks[0].iterations] == [1] * 3


@pytest.mark.parametrize("wrapper", ["ours", "torch"])
def test_a_module_inside_a_data_parallel_one_gets_a_warning(two_ranks, wrapper):
    for warned in two_ranks.run(bodies.record_inside, wrapper):
        (message,) = warned
        assert message.startswith("recording: Sequential runs inside a DistributedDataParallel, so its times contain")


def test_an_error_in_training_comes_through_and_detaches():
    module = nn.Linear(2, 1)
    with pytest.raises(ZeroDivisionError), record(module):
        _ = 1 / 0
    assert not module._forward_hooks


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (nn.Linear(1, 1), "nothing was recorded: expected at least one forward pass"),
        (nn.ReLU(), "expected at least one trainable parameter, ReLU has none"),
        (nn.Linear(1, 1, device="meta"), "expected all parameters on the CPU or on a CUDA device, weight is on meta"),
    ],
)
def test_what_cannot_be_recorded_is_refused(module, says):
    with pytest.raises((RuntimeError, ValueError), match=says), record(module):
        pass


@pytest.fixture
def gpu(monkeypatch):
    """A simulated GPU on which the recorder times all modules."""
    gpu = SimulatedGpu()
    monkeypatch.setattr(ddplab.reference.recorder, "clock_of", lambda _device, spare: gpu.clock())
    return gpu


LAYERS_NS = [(300_000, 500_000), (200_000, 700_000), (100_000, 900_000)]
"""Forward and backward of each layer."""


def layers(gpu):
    return nn.Sequential(*(SimulatedLayer(gpu, *ns) for ns in LAYERS_NS))


def test_a_module_has_the_times_of_the_gpu_behind_the_host(gpu):
    module = layers(gpu)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda *_: gpu.launch(50_000))
    with record(module) as recording:
        waits = gpu.synchronizations
        start_ns = gpu.host_ns
        for _ in range(5):
            module(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert gpu.synchronizations == waits
        assert gpu.host_ns - start_ns < gpu.stream.free_ns - start_ns - 10**7  # the host is far ahead
    iterations = recording.trace.ranks[0].iterations
    assert len(iterations) == 5
    near = {"abs": 60}
    for one in iterations[1:]:
        assert one.forward_end_ns - one.forward_start_ns == pytest.approx(600_000, **near)
        ready = [one.ready_ns[2 * layer] - one.backward_start_ns for layer in (2, 1, 0)]
        gaps = [backward for _, backward in reversed(LAYERS_NS)]
        assert ready == pytest.approx(list(accumulate(gaps)), **near)
        assert one.duration_ns == pytest.approx(2_750_000, **near)
        assert one.host_bound_ns is None
    for before, after in pairwise(iterations):
        assert before.end_ns == after.forward_start_ns
    assert recording.trace.ranks[0].clock_uncertainty_ns > 0


def test_interrupted_and_discarded_iterations_leave_nothing_behind(gpu):
    module = layers(gpu)
    fails = module[1].linear.weight.register_post_accumulate_grad_hook(lambda _: 1 / 0)
    with record(module) as recording:
        for _ in range(50):
            with pytest.raises(ZeroDivisionError):
                module(torch.ones(1, 2)).sum().backward()
            module(torch.ones(1, 2))  # without a backward pass
            gpu.spend(10**8)
        fails.remove()
        for _ in range(2):
            module(torch.ones(1, 2)).sum().backward()
        clock = recording._timestamps._clock
    assert not clock._pending
    assert len(clock._free) + 1 == gpu.events < 60
    complete = [one for one in recording.trace.ranks[0].iterations if None not in one.ready_ns]
    assert len(complete) == 2


def test_a_step_whose_closure_runs_forward_and_backward_updates_after_its_backward_pass():
    """As Lightning trains, and LBFGS: such a step begins before the forward pass of its iteration."""
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    with record(module) as recording:
        for _ in range(3):
            optimizer.step(closure)
    for one in recording.trace.ranks[0].iterations:
        assert one.backward_end_ns == one.optimizer_start_ns < one.optimizer_end_ns <= one.end_ns


@pytest.mark.parametrize("wrapper", ["ours", "torch"])
def test_buckets_on_a_gpu_end_with_the_last_all_reduce(two_ranks, wrapper):
    """Copies out come after the backward pass, as in an imported profile."""
    for trace, waits, events in two_ranks.run(bodies.record_on_simulated_gpu, wrapper, LAYERS_NS):
        assert waits == 0
        assert events < 150
        if wrapper == "ours":  # only there the simulated GPU copies
            assert recorded_model(trace).includes_copy_out
        for rank in trace.ranks:
            assert len(rank.iterations) == 6
            for one in rank.iterations:
                assert len(one.buckets) == len(trace.layouts[one.layout])
                done_ns = max(bucket.done_ns for bucket in one.buckets)
                assert one.backward_end_ns == max(done_ns, *one.ready_ns)
                assert one.buckets[-1].copied_out_ns >= one.backward_end_ns
                for bucket, members in zip(one.buckets, trace.layouts[one.layout], strict=True):
                    last_ns = max(one.ready_ns[index] for index in members)
                    assert last_ns <= bucket.ready_ns <= bucket.launched_ns


def test_the_bandwidth_of_a_gpu_is_that_of_its_data_sheet():
    a100 = SimpleNamespace(memory_clock_rate=1_215_000, memory_bus_width=5120)
    assert ddplab.reference.recorder._memory_bytes_per_s(a100) == pytest.approx(1.555e12, rel=1e-3)
    assert ddplab.reference.recorder._memory_bytes_per_s(SimpleNamespace()) is None
