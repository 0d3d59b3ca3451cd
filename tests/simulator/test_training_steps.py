"""Training steps in a file of torch's profiler: where they begin and end, and what they contain."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.errors import TraceError
from ddplab.simulator import import_profile
from ddplab.simulator.profiler_import.profiler_events import read_profiler_file
from ddplab.simulator.profiler_import.training_steps import slow_down_beside_collectives

from . import profiler_files
from .profiler_files import REAL, SMALL, scripts, without, write


def test_steps_that_differ_are_left_out_and_told(tmp_path):
    document, _ = profiler_files.profile(SMALL)
    events = document["traceEvents"]
    events.remove(next(one for one in events if one["name"] == "c10d::allreduce_"))
    imported = import_profile([write(document, tmp_path / "rank0.json")])
    assert len(imported.steps) == 2
    assert any(note.startswith("rank0.json: 1 of 3 steps have other gradients") for note in imported.notes)


@given(scripts())
def test_without_marks_steps_are_those_of_the_data_parallel_module_or_the_optimiser(tmp_path, script):
    document, truths = profiler_files.profile(script)
    for names in (("ProfilerStep",), ("ProfilerStep", "DistributedDataParallel")):
        report = import_profile([write(without(document, *names), tmp_path / "rank0.json")]).to_json()
        assert len(report["iteration_ns"]) == len(truths)
        assert report["all_reduce_ns"] == [
            pytest.approx([end - start for start, end in truth.all_reduces_ns], abs=3) for truth in truths
        ]


def test_passes_whose_loss_is_computed_in_the_forward_pass_are_counted(tmp_path):
    """The message was one on two wrappers."""
    document, _ = profiler_files.profile(replace(SMALL, steps=2))
    *_, second = (one for one in document["traceEvents"] if one["name"].startswith("ProfilerStep"))
    document = without(document, "ProfilerStep#1")
    first = next(one for one in document["traceEvents"] if one["name"] == "ProfilerStep#0")
    first["dur"] = second["ts"] + second["dur"] - first["ts"]
    with pytest.raises(TraceError, match=r"expected one backward pass in each step, got 2 in step 0"):
        import_profile([write(document, tmp_path / "rank0.json")])


def test_steps_without_gradients_may_be_replays_of_a_graph(tmp_path):
    document = without(profiler_files.profile(SMALL)[0], "torch::autograd::AccumulateGrad")
    with pytest.raises(TraceError, match=r"got none in 3 steps; .* no CUDA graph \(--set cuda_graph=true"):
        import_profile([write(document, tmp_path / "rank0.json")])


@given(scripts(), st.sampled_from(["marks of one step", "processes with gradients"]))
def test_the_events_of_two_ranks_in_one_file_are_refused(tmp_path, script, differs):
    """Gradients and all-reduces of both counted as those of one step."""
    document, _ = profiler_files.profile(script)
    events = document["traceEvents"]
    if differs == "processes with gradients":
        document = without(document, "ProfilerStep")
        events = [one | {"pid": one["pid"] + 1000} for one in document["traceEvents"]]
    document["traceEvents"] += events
    with pytest.raises(TraceError, match=f"expected the events of one rank, each once, got .*{differs}: 2"):
        import_profile([write(document, tmp_path / "rank0.json")])


def test_kernels_beside_collectives_are_compared_with_equal_ones_alone(tmp_path):
    """Of two equal kernels of 100 us, the one beside a collective takes 150 us."""
    gpu = profiler_files.Gpu()
    gpu.launch("matmul", 1, 0, 100_000, grid=[1])
    gpu.launch("ncclKernel_AllReduce", 1, 200_000, 400_000, stream=profiler_files.LIBRARY)
    gpu.launch("matmul", 1, 300_000, 150_000, grid=[1])
    gpu.launch("matmul", 1, 310_000, 170_000, grid=[2])
    file = read_profiler_file(write({"traceEvents": gpu.events}, tmp_path / "rank0.json"))
    assert slow_down_beside_collectives(file) == (pytest.approx(1.5), 1)


# Real files, with facts that were read off them by other means


def test_the_steps_of_resnet50_on_an_a100_that_waits_for_its_host():
    report = import_profile([REAL / "a100x2_resnet50_rank0.json.gz"]).to_json()
    assert report["gpu"] == "NVIDIA A100-PG509-200"
    assert (report["world_size"], report["steps"], report["gradients"]) == (2, 3, 161)
    assert report["buckets_bytes"] == [8196000, 31502336, 26255360, 26550272, 9724160]
    assert report["iteration_ns"] == pytest.approx([222.44e6, 219.73e6, 224.94e6], abs=1e4)
    assert report["backward_start_ns"][0] == pytest.approx(104.80e6, abs=1e4)
    assert report["backward_end_ns"][0] == pytest.approx(190.08e6, abs=1e4)
    assert report["backward_computing_ns"][0] == pytest.approx(24.87e6, rel=0.002)
    assert report["last_all_reduce_end_ns"][0] == pytest.approx(191.78e6, abs=1e4)
    assert report["copies_out"][0] == 161
    assert report["copied_out_ns"][0] == pytest.approx(207.25e6, abs=1e4)
    assert report["host_bound"] > 0.7


def test_the_steps_of_resnet50_on_a_v100_whose_host_runs_ahead():
    """Gaps between ready times in ms, from the published table of the same steps."""
    imported = import_profile([REAL / "v100x1_resnet50_rank0.json.gz"])
    report = imported.to_json()
    assert (report["gpu"], report["world_size"], report["steps"]) == ("Tesla V100-SXM2-32GB", 1, 5)
    spans = [one.ready_ns[0] - one.ready_ns[-1] for one in imported.trace.ranks[0].iterations[2:]]
    assert spans == pytest.approx([95.572e6 - 32.465e6, 95.660e6 - 32.315e6, 95.399e6 - 32.383e6], abs=2e4)
    assert report["host_bound"] < 0.05
    assert not any(map(any, report["all_reduce_ns"]))
