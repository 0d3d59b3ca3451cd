"""The recorder: recorded times are right, and recording does not change the training."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from reference.recorder import record
from reference.timing_hooks import Timestamps, rank_trace
from reference.trace import Trace
from simulator import Fabric, predict

from . import bodies

WRAPPERS = ["ours", "torch", "module"]
OWNERS = ["our", "torch's"]
PARAMETERS = 6


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_recording_changes_no_gradient(two_ranks, wrapper):
    for _trace, watched, unwatched in two_ranks.run(bodies.record_training, wrapper, 4):
        for mine, theirs in zip(watched, unwatched, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_rank_gets_the_whole_trace(two_ranks, wrapper):
    (first, *_), (second, *_) = two_ranks.run(bodies.record_training, wrapper, 4)
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
        for before, after in zip(rank.iterations, rank.iterations[1:], strict=False):
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


def test_a_ranks_offset_counts_from_its_own_start():
    """Its clock is 7 ns behind rank 0's, and its recording began 100 ns later on its own clock."""
    timestamps = Timestamps(1)
    timestamps.forward_started()
    timestamps.forward_ended(synchronized=False, layout=None)
    timestamps.backward_started()
    timestamps.backward_ended()
    timestamps.finish_iteration()
    in_ns = timestamps.in_ns()
    trace = rank_trace(1, 7, 0, in_ns, zero=in_ns.zero - 100, layouts={})
    assert trace.clock_offset_ns == 107


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
        assert [iteration.optimizer_start_ns is None for iteration in rank.iterations] == [
            True,
            False,
            True,
            False,
        ]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_recording_can_be_replayed(two_ranks, wrapper):
    trace, *_ = two_ranks.run(bodies.record_training, wrapper, 4)[0]
    prediction = predict(trace, Fabric.from_alpha_beta(1000, 1e9), world_size=4)
    assert prediction.iteration_ns >= prediction.compute_ns > 0


@pytest.mark.parametrize(
    ("oddity", "iterations"),
    [
        ("a backward pass beside the output", 1),
        ("a comm hook that sends something else", 4),
        ("two at once", 2),
        ("a forward pass without backward, then no_sync", 1),
        ("a bucket that is skipped", 3),
        ("our class that ignores a parameter", 3),
        ("torch's class that ignores a parameter", 3),
    ],
)
def test_an_unusual_script_keeps_its_recording(two_ranks, oddity, iterations):
    for trace in two_ranks.run(bodies.record_oddly, oddity):
        assert len(trace.ranks[0].iterations) == iterations


def test_two_recordings_at_once_see_their_buckets_and_print_nothing():
    """Each once registered a kernel of its own: torch warned, and called only the one registered last."""
    script = Path(__file__).parent / "scripts" / "record_two_at_once.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


@pytest.mark.parametrize(
    "when", ["during the backward pass", "between two backward passes", "before the backward pass"]
)
def test_a_step_that_does_not_follow_the_backward_pass_keeps_its_recording(when):
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    if when == "during the backward pass":
        module.weight.register_post_accumulate_grad_hook(lambda _parameter: optimizer.step())
    with record(module) as recording:
        for _ in range(2):
            loss = module(torch.ones(1, 2)).sum()
            if when == "before the backward pass":
                optimizer.step()
            loss.backward()
            if when == "between two backward passes":
                optimizer.step()
                module.weight.sum().backward()
                optimizer.step()
    for iteration in recording.trace.ranks[0].iterations:
        assert (iteration.optimizer_start_ns is not None) == (when == "between two backward passes")


def test_every_rank_may_save_to_the_same_path(two_ranks, tmp_path):
    two_ranks.run(bodies.save_trace_to_one_path, str(tmp_path / "trace.json.gz"))
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json.gz"]
    assert len(Trace.load(tmp_path / "trace.json.gz").ranks) == 2


def test_a_plain_module_is_recorded_without_a_process_group():
    module = nn.Linear(2, 1)
    with record(module) as recording:
        for _ in range(2):
            module(torch.ones(1, 2)).sum().backward()
    trace = recording.trace
    assert (trace.workload.model, trace.workload.backend, trace.layouts) == ("Linear", None, ())
    assert [iteration.synchronized for iteration in trace.ranks[0].iterations] == [False, False]


def test_hooks_are_gone_after_the_recording():
    module = nn.Linear(2, 1)
    with record(module) as recording:
        module(torch.ones(1, 2)).sum().backward()
    before = recording.trace
    module(torch.ones(1, 2)).sum().backward()
    assert recording.trace == before
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
    assert not module.weight._post_accumulate_grad_hooks


def test_recorded_buckets_are_those_of_the_parameters_that_are_not_ignored(two_ranks):
    ours, torchs = (
        two_ranks.run(bodies.record_oddly, f"{whose} class that ignores a parameter")[0] for whose in OWNERS
    )
    assert ours.layouts[-1] == torchs.layouts[-1] == ((2, 1, 0),)
    assert all(len(iteration.buckets) == 1 for trace in (ours, torchs) for iteration in trace.ranks[0].iterations)


@pytest.mark.parametrize("kind", ["a parameter", "one tensor again and again"])
def test_tensors_that_outlive_the_recording_keep_no_hooks(kind):
    """A module may return a leaf, or a tensor that it returned before, which gets one hook at most."""
    module = nn.Linear(2, 1)
    kept = module.weight if kind == "a parameter" else module(torch.ones(1, 2))
    inner = module.forward
    module.forward = lambda x: (inner(x), kept)
    with record(module) as recording:
        for _ in range(3):
            output, _ = module(torch.ones(1, 2))
            assert len(kept._backward_hooks or ()) <= 1
            output.sum().backward()
    assert not kept._backward_hooks
    assert len(recording.trace.ranks[0].iterations) == 3


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


def test_several_passes_before_one_backward_are_one_iteration():
    module = nn.Linear(2, 1)
    with record(module) as recording:
        (module(torch.ones(1, 2)) + module(torch.ones(1, 2))).sum().backward()
    assert len(recording.trace.ranks[0].iterations) == 1


def test_nothing_recorded_is_an_error_that_says_what_is_needed():
    with (
        pytest.raises(RuntimeError, match="nothing was recorded: expected at least one forward pass"),
        record(nn.Linear(1, 1)),
    ):
        pass


def test_a_module_without_parameters_is_refused():
    with pytest.raises(ValueError, match="expected at least one trainable parameter, ReLU has none"):
        record(nn.ReLU())


def test_a_module_elsewhere_than_on_the_cpu_or_a_gpu_is_refused():
    with pytest.raises(ValueError, match="expected all parameters on the CPU or on a CUDA device, weight is on meta"):
        record(nn.Linear(1, 1, device="meta"))
