"""Import: what files of torch's profiler show is found again, and damaged files are told in one line."""

import gzip
import json
import re
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ddplab.reference.errors import TraceError
from ddplab.reference.trace import Trace
from ddplab.simulator import Fabric, import_profile, predict
from ddplab.simulator.fabric import Linear
from ddplab.simulator.workload.compute_times import host_bound

from ..explore import examples
from . import kineto_bodies as bodies
from . import profiler_files
from .profiler_files import SMALL, scripts, write


@given(scripts())
def test_a_script_is_found_again_in_its_file(tmp_path, script):
    """Whether the host runs ahead of the GPU or the GPU waits for the host."""
    document, truths = profiler_files.profile(script)
    imported = import_profile([write(document, tmp_path / "rank0.json")])
    count, (rank,) = len(script.shapes), imported.trace.ranks
    assert imported.trace.workload.world_size == script.world_size
    assert imported.trace.workload.device_name == "a GPU"
    sizes = [4 * int(np.prod(shape)) for shape in script.shapes]
    assert imported.trace.sizes_bytes[::-1] == sizes
    edges = [0, *accumulate(script.buckets)]
    members = tuple(tuple(count - 1 - place for place in range(*edge)) for edge in pairwise(edges))
    assert imported.trace.layouts == (members,)
    report = imported.to_json()
    assert report["buckets_bytes"] == [sum(sizes[start:end]) for start, end in pairwise(edges)]
    assert len(rank.iterations) == len(truths)
    for one, truth in zip(rank.iterations, truths, strict=True):
        assert one.duration_ns == pytest.approx(truth.iteration_ns, abs=3)
        ready_ns = [ns - one.forward_start_ns for ns in one.ready_ns][::-1]
        assert ready_ns == pytest.approx(truth.ready_ns, abs=3)
        ends_ns = [bucket.done_ns - one.forward_start_ns for bucket in one.buckets]
        assert ends_ns == pytest.approx([end for _, end in truth.all_reduces_ns], abs=3)
        assert one.buckets[-1].copied_out_ns - one.forward_start_ns == pytest.approx(truth.copied_out_ns, abs=3)
    for durations, truth in zip(report["all_reduce_ns"], truths, strict=True):
        assert durations == pytest.approx([end - start for start, end in truth.all_reduces_ns], abs=3)
    json.dumps(report, allow_nan=False)


@given(scripts())
def test_a_replay_of_an_imported_step_takes_its_time(tmp_path, script):
    """With the durations of its own all-reduces. The copies that the trace contains are not charged again."""
    document, _ = profiler_files.profile(script)
    trace = import_profile([write(document, tmp_path / "rank0.json")]).trace
    sizes = [sum(trace.sizes_bytes[index] for index in bucket) for bucket in trace.layouts[0]]
    assume(len(set(sizes)) == len(sizes))  # buckets of equal bytes have one cost
    rows = [(2, size, ns) for size, ns in zip(sizes, script.all_reduce_ns, strict=True)]
    fabric = Fabric.from_table(rows).with_processor(copy_out=Linear(fixed_ns=1e7))
    prediction = predict(trace, fabric, world_size=2, plan=trace.layouts[0], assume=False)
    calls_ns = 50_000 + script.host_ns  # of the host for a gradient, from its kernel's end to the bucket's launch
    for predicted_ns, one in zip(prediction.samples_ns, trace.ranks[0].iterations, strict=True):
        assert predicted_ns == pytest.approx(one.duration_ns, abs=calls_ns * len(script.shapes))


def test_a_gpu_that_waits_for_its_host_is_host_bound(tmp_path):
    imported = {}
    for host_ns in (3_000_000, 6_000):
        document, _ = profiler_files.profile(replace(SMALL, host_ns=host_ns))
        imported[host_ns] = import_profile([write(document, tmp_path / "rank0.json")])
    assert host_bound(imported[3_000_000].trace) > 0.5
    assert any("host-bound" in note for note in imported[3_000_000].notes)
    assert host_bound(imported[6_000].trace) < 0.1


def test_files_of_two_ranks_are_put_on_one_clock(tmp_path):
    """Rank 1 is a copy of rank 0 whose clock is 5 ms ahead, so collectives end at the same moments."""
    document, _ = profiler_files.profile(SMALL)
    first = write(document, tmp_path / "rank0.json")
    later = [one | {"ts": one["ts"] + 5_000} for one in document["traceEvents"]]
    extra = {"ph": "X", "cat": "cpu_op", "name": "aten::empty", "pid": 1, "tid": 1, "ts": 0, "dur": 1}
    document["traceEvents"] = [*later, extra]
    document["distributedInfo"]["rank"] = 1
    second = write(document, tmp_path / "rank1.json")
    trace = import_profile([second, first]).trace
    one, other = trace.ranks
    assert (one.rank, other.rank) == (0, 1)
    for mine, theirs in zip(one.iterations, other.iterations, strict=True):
        assert mine.buckets[0].done_ns == theirs.buckets[0].done_ns + other.clock_offset_ns
    with pytest.raises(TraceError, match=r"rank1.json: expected one file per rank, got another one of rank 1"):
        import_profile([second, second])


@given(data=st.data(), script=scripts(), ranks=st.integers(2, 4), same_host=st.booleans())
def test_an_all_reduce_lasts_from_its_last_arrival_to_its_last_completion(tmp_path, data, script, ranks, same_host):
    """Each rank arrives and completes at its own time; without a common clock, the shortest kernel counts."""
    others = st.lists(st.integers(0, 400_000), min_size=ranks - 1, max_size=ranks - 1)
    early = others.flatmap(lambda some: st.permutations([0, *some]))
    late = st.lists(st.integers(0, 300), min_size=ranks, max_size=ranks)
    document, truths = profiler_files.profile(script)
    reduced = [span for truth in truths for span in truth.all_reduces_ns]
    spans = [
        [(start - a, end + b) for a, b in zip(data.draw(early), data.draw(late), strict=True)]
        for start, end in reduced
    ]
    paths = []
    for rank in range(ranks):
        clock_us = data.draw(st.integers(0, 10**6))
        copy = json.loads(json.dumps(document)) | {"baseTimeNanoseconds": 10**18 - 1000 * clock_us * same_host}
        copy["distributedInfo"] |= {"rank": rank, "world_size": ranks}
        kernels = [one for one in copy["traceEvents"] if one["name"].startswith("ncclDevKernel")]
        for of_ranks, (start_ns, _), kernel in zip(spans, reduced, kernels, strict=True):
            start, end = of_ranks[rank]
            kernel["ts"] += (start - start_ns) / 1e3
            kernel["dur"] = (end - start) / 1e3
        for one in copy["traceEvents"]:
            one["ts"] += clock_us
        paths.append(write(copy, tmp_path / f"node{0 if same_host else rank}_{rank}.17.pt.trace.json"))
    durations = [
        max(end for _, end in of_ranks) - max(start for start, _ in of_ranks)
        if same_host
        else min(end - start for start, end in of_ranks)
        for of_ranks in spans
    ]
    expected = np.median(np.reshape(durations, (len(truths), -1)), axis=0)
    imported = import_profile(paths)
    assert imported.all_reduces_ns == pytest.approx(expected, abs=500)
    assert imported.to_json()["all_reduce_without_wait_ns"] == list(imported.all_reduces_ns)
    assert any("without the wait for other ranks, the all-reduces" in note for note in imported.notes)


@pytest.mark.parametrize("wrapper", ["torch", "module"])
def test_a_file_of_the_processor_agrees_with_the_recorder(two_ranks, tmp_path, wrapper):
    """Both watch the same iterations; ready times since their starts differ by less than 2 % or 0.2 ms."""
    recorded, *_ = two_ranks.run(bodies.profile_and_record, wrapper, str(tmp_path))
    imported = import_profile(sorted(tmp_path.glob("*.json"))).trace
    assert imported.sizes_bytes == recorded.sizes_bytes
    assert imported.workload.source == recorded.workload.source
    for mine, theirs in zip(imported.ranks, recorded.ranks, strict=True):
        differences = []
        for one, other in zip(mine.iterations, theirs.iterations, strict=True):
            assert len(one.buckets) == len(other.buckets)
            for ours, expected in zip(one.ready_ns, other.ready_ns, strict=True):
                since, truth = ours - one.forward_start_ns, expected - other.forward_start_ns
                differences.append(abs(since - truth) - max(200_000, 0.02 * truth))
        assert np.median(differences) < 0
        spans = [one.backward_end_ns - one.backward_start_ns for one in mine.iterations]
        assert min(spans) > 2_000_000, "the backward pass is long compared with 0.2 ms"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"find_unused_parameters": True}, None),
        ({"gradient_as_bucket_view": True}, None),
        ({"no_sync": 3}, r"8 of 12 steps have no all-reduce, as with no_sync; .* --set sync_every=3"),
    ],
)
def test_variants_of_torchs_class_are_read_with_their_buckets(two_ranks, tmp_path, change, message):
    two_ranks.run(bodies.profile_variant, change, str(tmp_path))
    imported = import_profile(sorted(tmp_path.glob("*.json")))
    trace = imported.trace
    assert {one.shape for one in trace.workload.parameters} == {(64,), (64, 1024), (1024,), (1024, 512)}
    assert imported.to_json()["buckets_bytes"] == [
        sum(trace.sizes_bytes[index] for index in bucket) for bucket in trace.layouts[0]
    ]
    assert len(trace.layouts[0]) >= 2
    assert message is None or any(re.search(message, note) for note in imported.notes)


def test_several_backward_passes_in_a_step_are_refused(two_ranks, tmp_path):
    two_ranks.run(bodies.profile_variant, {"passes": 2}, str(tmp_path))
    with pytest.raises(TraceError, match=r"expected one backward pass in each step, got 2 in step"):
        import_profile(sorted(tmp_path.glob("*.json")))


# Damage

DOCUMENT, _ = profiler_files.profile(replace(SMALL, steps=1))
TEXT = json.dumps(DOCUMENT)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@st.composite
def damaged_files(draw) -> bytes:
    """A file of which bytes were lost or changed, events were lost, or a value became another one."""
    match draw(st.sampled_from(["cut", "bytes", "gzip", "events", "value"])):
        case "cut":
            return TEXT[: draw(st.integers(0, len(TEXT) - 1))].encode()
        case "bytes":
            changed = bytearray(TEXT.encode())
            for place in draw(st.lists(st.integers(0, len(changed) - 1), min_size=1, max_size=5)):
                changed[place] = draw(st.integers(0, 255))
            return bytes(changed)
        case "gzip":
            packed = bytearray(gzip.compress(TEXT.encode(), mtime=0))
            packed[draw(st.integers(0, len(packed) - 1))] ^= draw(st.integers(1, 255))
            return bytes(packed)
        case kind:
            document = json.loads(TEXT)
            events = document["traceEvents"]
            place = draw(st.integers(0, len(events) - 1))
            if kind == "events":
                del events[place : place + draw(st.integers(1, 40))]
            else:
                targets = [events[place], document, document["distributedInfo"]]
                target = draw(st.sampled_from(targets + [events[place]["args"]] * bool(events[place]["args"])))
                target[draw(st.sampled_from(sorted(target)))] = draw(JSON_VALUES)
            return json.dumps(document).encode()


@examples(30)
@given(damaged_files())
def test_a_damaged_file_is_read_or_told_in_one_line(tmp_path, data):
    path = tmp_path / "rank0.json"
    path.write_bytes(data)
    try:
        trace = import_profile([path]).trace
    except ValueError as error:
        message = str(error)
    else:
        assert Trace.model_validate(trace.model_dump()) == trace
        return
    assert message.startswith(str(path))
    assert "\n" not in message


def test_files_that_were_mixed_up_are_told_with_what_to_do(tmp_path):
    document, _ = profiler_files.profile(SMALL)
    path = write(document, tmp_path / "rank0.json")
    with pytest.raises(TraceError, match=r"rank0.json: expected a trace, got a file of torch's profiler; .*import"):
        Trace.load(path)
    for name in ("trace.json", "trace.json.gz"):
        import_profile([path]).trace.save(tmp_path / name)
        with pytest.raises(ValueError, match=rf"{name}: expected a fabric file, got a trace"):
            Fabric.load(tmp_path / name)
    with pytest.raises(TraceError, match=r"got a trace of ddplab, which `ddplab predict` takes"):
        import_profile([tmp_path / "trace.json"])


# Profiles as people have them


def event(name: str, ts: float, dur: float, cat: str = "user_annotation", **args: object) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 100, "tid": 1, "ts": ts, "dur": dur, "args": args}


def durations(document: dict[str, object], tmp_path) -> list[int]:
    return import_profile([write(document, tmp_path / "rank0.json")]).to_json()["iteration_ns"]


@pytest.mark.parametrize("prefetches", [False, True])
def test_kernels_of_the_step_before_are_no_part_of_the_first(tmp_path, prefetches):
    """Nor are they if a copy of the next batch on another stream, whose launch is in the file, runs before them."""
    document, truths = profiler_files.profile(SMALL)
    first = min(one["ts"] for one in document["traceEvents"] if one["cat"] == "kernel")
    last = {"device": 0, "stream": 7, "correlation": 10**6}
    for one in document["traceEvents"]:  # the GPU is 30 ms behind its host
        one["ts"] += 30_000 * (one["cat"] in ("kernel", "gpu_memcpy"))
    document["traceEvents"].append(event("of the step before", first - 1_000, 31_000, "kernel", **last))
    if prefetches:
        copy = {"device": 0, "stream": 9, "correlation": 10**6 + 1}
        document["traceEvents"] += [
            event("cudaMemcpyAsync", first - 3_000, 2, "cuda_runtime", correlation=10**6 + 1),
            event("Memcpy HtoD", first - 2_000, 2, "gpu_memcpy", **copy),
        ]
    assert durations(document, tmp_path)[0] < 1.1 * truths[0].iteration_ns


def test_a_module_in_another_one_begins_no_step_and_set_up_is_none(tmp_path):
    document, truths = profiler_files.profile(SMALL)
    expected = pytest.approx([truth.iteration_ns for truth in truths[:-1]], rel=0.1)
    nested = profiler_files.without(document, "ProfilerStep")
    outer = [one for one in nested["traceEvents"] if one["name"] == "DistributedDataParallel.forward"]
    nested["traceEvents"] += [one | {"ts": one["ts"] + 10, "dur": one["dur"] / 2} for one in outer]
    assert durations(nested, tmp_path)[:-1] == expected
    marked = profiler_files.without(document, "ProfilerStep", "DistributedDataParallel")
    marked["traceEvents"].append(event("aten::normal_", -500_000, 400_000, "cpu_op"))
    assert max(durations(marked, tmp_path)) < 1.5 * truths[0].iteration_ns


def test_a_mark_without_a_duration_begins_no_step(tmp_path):
    document, _ = profiler_files.profile(SMALL)
    expected = durations(profiler_files.without(document, "ProfilerStep"), tmp_path)
    for one in document["traceEvents"]:
        one["dur"] = 0.0 if one["name"].startswith("ProfilerStep") else one["dur"]
    assert durations(document, tmp_path) == expected


def test_the_rank_is_that_of_the_name_if_the_file_has_none(tmp_path):
    document, _ = profiler_files.profile(SMALL)
    del document["distributedInfo"]
    trace = import_profile([write(document, tmp_path / f"trace_rank{rank}.json") for rank in (1, 0)]).trace
    assert ([rank.rank for rank in trace.ranks], trace.workload.world_size) == ([0, 1], 2)


@pytest.mark.parametrize("of_ddp", [(), ("DistributedDataParallel", "c10d::", "nccl:", "ncclKernel")])
def test_a_gradient_without_a_shape_is_in_no_bucket_if_its_bytes_say_so(tmp_path, of_ddp):
    script = replace(SMALL, buckets=(2, 2))
    document = profiler_files.without(profiler_files.profile(script)[0], *of_ddp)
    known = import_profile([write(document, tmp_path / "rank0.json")]).trace
    grown = [
        one | {"ts": one["ts"] - 0.5, "args": {"Input Dims": [[]], "Input type": [""]}}
        for one in document["traceEvents"]
        if one["name"] == "torch::autograd::AccumulateGrad" and one["args"]["Input Dims"] == [[3, 2]]
    ]
    document["traceEvents"] += grown
    imported = import_profile([write(document, tmp_path / "rank0.json")])
    assert imported.trace.workload.parameters == known.workload.parameters
    assert imported.trace.layouts == known.layouts
    assert any("without a shape" in note for note in imported.notes)


@pytest.mark.parametrize("name", ["FSDP::all_gather (0)", "FullyShardedDataParallel.forward"])
def test_a_profile_of_something_else_is_refused_by_name(tmp_path, name):
    document, _ = profiler_files.profile(SMALL)
    document["traceEvents"].insert(0, event(name, 1, 2))
    with pytest.raises(TraceError, match=rf"got FSDP \(events named {name[:8]}") as caught:
        import_profile([write(document, tmp_path / "rank0.json")])
    assert "\n" not in str(caught.value)


@given(profiler_files.scripts())
def test_what_contradicts_the_reading_is_refused(tmp_path, script):
    """A lost computing stream or some kernels, all-reduces of several ranks without any, and a second wrapper."""
    document, _ = profiler_files.profile(script)
    computing = [one for one in document["traceEvents"] if one["cat"] == "kernel" and "nccl" not in one["name"]]
    collectives = [one for one in document["traceEvents"] if one["cat"] == "kernel" and "nccl" in one["name"]]
    copies = [one for one in document["traceEvents"] if one["cat"] == "gpu_memcpy"]

    def left(*gone: list[dict[str, object]]) -> dict[str, object]:
        names = {id(one) for some in gone for one in some}
        return document | {"traceEvents": [one for one in document["traceEvents"] if id(one) not in names]}

    ids = {one["args"]["correlation"] for one in collectives}
    all_reduces = [one for one in document["traceEvents"] if one["args"].get("correlation") in ids]
    forward = next(one for one in document["traceEvents"] if one["name"] == "DistributedDataParallel.forward")
    optimizer = next(one for one in document["traceEvents"] if one["name"].startswith("Optimizer.step"))
    second = forward | {"ts": optimizer["ts"], "dur": optimizer["dur"] / 2}
    wrong = {
        f"got nothing of {len(computing) + len(copies)}, as if a stream was lost": left(computing, copies),
        f"got nothing of {len(computing[::2])}, as if a stream was lost": left(computing[::2]),
        "expected a kernel of each all-reduce of 2 ranks, got none": left(all_reduces),
        "got a gradient before the last DistributedDataParallel.forward": document
        | {"traceEvents": [*document["traceEvents"], second]},
    }
    for message, told in wrong.items():
        with pytest.raises(TraceError, match=message) as caught:
            import_profile([write(told, tmp_path / "rank0.json")])
        assert "\n" not in str(caught.value)
    alone = left(all_reduces)
    alone["distributedInfo"] = {"backend": "nccl", "rank": 0, "world_size": 1}
    assert import_profile([write(alone, tmp_path / "rank0.json")]).trace.workload.world_size == 1


def test_a_run_has_as_many_ranks_as_its_largest_group_at_least(tmp_path):
    """The number of ranks in the header won over that of the collectives, which is of more."""
    document, _ = profiler_files.profile(profiler_files.SMALL)
    for one in document["traceEvents"]:
        one["args"] |= {"Group size": 8} if one["name"] == "record_param_comms" else {}
    assert import_profile([write(document, tmp_path / "rank0.json")]).trace.workload.world_size == 8
