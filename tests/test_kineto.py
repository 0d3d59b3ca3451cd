"""Import: what files of torch's profiler show is found again, and damaged files are told in one line."""

import gzip
import json
import re
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from reference.errors import TraceError
from reference.trace import Parameter, Trace
from simulator import Fabric, emulate, import_profile, predict
from simulator.fabric import Linear
from simulator.profiler_import.profiler_events import read_profiler_file
from simulator.profiler_import.trace_of_profile import host_bound
from simulator.profiler_import.training_steps import slow_down_beside_collectives

from . import bodies, profiler_files
from .explore import examples
from .profiler_files import Script, scripts, write

SMALL = Script(
    shapes=((4, 3), (4,), (3, 2), (3,)), buckets=(1, 3), kernel_ns=(900_000, 400_000, 700_000, 300_000),
    host_ns=50_000, all_reduce_ns=(800_000, 600_000), steps=3, noted_shapes=True, vendor="cuda",
)  # fmt: skip


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
    prediction = predict(trace, fabric, world_size=2, plan=trace.layouts[0])
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


def test_an_imported_trace_is_saved_predicted_and_emulated(tmp_path):
    document, _ = profiler_files.profile(SMALL)
    trace = import_profile([write(document, tmp_path / "rank0.json")]).trace
    trace.save(tmp_path / "trace.json.gz")
    assert Trace.load(tmp_path / "trace.json.gz") == trace
    settings = {"world_size": 4, "bucket_cap_mb": 1e-4}
    fabric = Fabric.from_alpha_beta(alpha_ns=100_000, bytes_per_s=1e9)
    emulated = emulate(trace, fabric, **settings)
    assert emulated.samples_ns == predict(trace, fabric, **settings).samples_ns


def test_a_model_gives_names_and_is_checked(tmp_path):
    document, _ = profiler_files.profile(replace(SMALL, noted_shapes=False))
    path = write(document, tmp_path / "rank0.json")
    given = [
        Parameter(name=f"layer.{number}", shape=shape, dtype="float32", size_bytes=4 * int(np.prod(shape)))
        for number, shape in enumerate(SMALL.shapes[::-1])
    ]
    named = import_profile([path], parameters=given).trace
    assert named.workload.parameters == tuple(given)
    assert named.layouts == import_profile([path]).trace.layouts
    with pytest.raises(ValueError, match=r"rank0.json: --model: expected a model with 4 trainable parameters"):
        import_profile([path], parameters=given[:3])
    with pytest.raises(ValueError, match=r"rank0.json: --model: expected a parameter of 48 bytes for gradient 0"):
        import_profile([path], parameters=[*given[:3], given[0]])


def test_gradients_in_another_order_than_in_their_buckets_are_found_by_their_bytes(tmp_path):
    """The gradient of 16 bytes became ready before the first bucket was launched but belongs to the second one."""
    script = replace(SMALL, shapes=((4,), (4, 3), (3, 2), (3,)), buckets=(2, 2))
    document, _ = profiler_files.profile(script)
    for one in document["traceEvents"]:
        if one["name"] == "record_param_comms":
            one["args"]["In msg nelems"] += {16: -4, 9: 4}[one["args"]["In msg nelems"]]
    imported = import_profile([write(document, tmp_path / "rank0.json")])
    assert imported.trace.layouts == (((2,), (3, 1, 0)),)
    assert any("of them count to a later bucket" in note for note in imported.notes)


@pytest.mark.parametrize("damage", ["no kernels", "correlations 0"])
def test_a_file_without_what_the_gpu_ran_is_refused(tmp_path, damage):
    document, _ = profiler_files.profile(SMALL)
    events = document["traceEvents"]
    if damage == "no kernels":
        document["traceEvents"] = [
            one for one in events if one.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset")
        ]
    for one in events:
        one.get("args", {}).update({} if damage == "no kernels" else {"correlation": 0})
    with pytest.raises(TraceError, match=r"expected what the GPU ran, .* and 0 with such an id; profile with"):
        import_profile([write(document, tmp_path / "rank0.json")])


def test_steps_that_differ_are_left_out_and_told(tmp_path):
    document, _ = profiler_files.profile(SMALL)
    events = document["traceEvents"]
    events.remove(next(one for one in events if one["name"] == "c10d::allreduce_"))
    imported = import_profile([write(document, tmp_path / "rank0.json")])
    assert len(imported.steps) == 2
    assert any(
        note.startswith("rank0.json: 1 of 3 steps differ from most steps in gradients or buckets")
        for note in imported.notes
    )


def without(document, *names):
    """The document without the events whose names begin like this."""
    events = [one for one in document["traceEvents"] if not one["name"].startswith(names)]
    return document | {"traceEvents": events}


@given(scripts())
def test_without_shapes_and_copies_a_bucket_is_divided_equally(tmp_path, script):
    document, _ = profiler_files.profile(replace(script, noted_shapes=False))
    document = without(document, profiler_files.COPY_OUT)
    imported = import_profile([write(document, tmp_path / "rank0.json")])
    sizes, buckets = imported.trace.sizes_bytes, imported.to_json()["buckets_bytes"]
    assert [sum(sizes[index] for index in bucket) for bucket in imported.trace.layouts[0]] == buckets
    for bucket in imported.trace.layouts[0]:
        assert max(sizes[index] for index in bucket) - min(sizes[index] for index in bucket) <= 4
    assert any("divided equally among its gradients" in note for note in imported.notes)


@given(scripts())
def test_all_reduces_of_single_gradients_outside_hooks_give_the_sizes(tmp_path, script):
    """As with functional collectives: the calls are not inside a hook, so there are no buckets."""
    script = replace(
        script, noted_shapes=False, buckets=(1,) * len(script.shapes), all_reduce_ns=(1_000_000,) * len(script.shapes)
    )
    document, _ = profiler_files.profile(script)
    document = without(document, profiler_files.COPY_OUT, "autograd::engine::evaluate_function: torch")
    imported = import_profile([write(document, tmp_path / "rank0.json")])
    assert imported.trace.sizes_bytes[::-1] == [4 * int(np.prod(shape)) for shape in script.shapes]
    assert imported.trace.layouts == ()
    assert imported.to_json()["buckets_bytes"] == []
    assert any(f"{len(script.shapes)} all-reduce" in note for note in imported.notes)


@given(scripts())
def test_without_marks_steps_are_those_of_the_data_parallel_module_or_the_optimiser(tmp_path, script):
    document, truths = profiler_files.profile(script)
    for names in (("ProfilerStep",), ("ProfilerStep", "DistributedDataParallel")):
        imported = import_profile([write(without(document, *names), tmp_path / "rank0.json")])
        durations = [truth.iteration_ns for truth in truths[:-1]]
        found = imported.to_json()["iteration_ns"][:-1]
        assert len(found) == len(durations)
        assert imported.to_json()["all_reduce_ns"] == [
            pytest.approx([end - start for start, end in truth.all_reduces_ns], abs=3) for truth in truths
        ]


def test_kernels_beside_collectives_are_compared_with_equal_ones_alone(tmp_path):
    """Of two equal kernels of 100 us, the one beside a collective takes 150 us."""
    gpu = profiler_files.Gpu()
    gpu.launch("matmul", 1, 0, 100_000, grid=[1])
    gpu.launch("ncclKernel_AllReduce", 1, 200_000, 400_000, stream=profiler_files.LIBRARY)
    gpu.launch("matmul", 1, 300_000, 150_000, grid=[1])
    gpu.launch("matmul", 1, 310_000, 170_000, grid=[2])
    file = read_profiler_file(write({"traceEvents": gpu.events}, tmp_path / "rank0.json"))
    assert slow_down_beside_collectives(file) == (pytest.approx(1.5), 1)


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
        ({"no_sync": 3}, r"8 of 12 steps have no all-reduce, as with no_sync; .* --policy sync_every=3"),
    ],
)
def test_variants_of_torchs_class_are_read_with_their_buckets(two_ranks, tmp_path, change, message):
    two_ranks.run(bodies.profile_variant, change, str(tmp_path))
    imported = import_profile(sorted(tmp_path.glob("*.json")))
    trace = imported.trace
    assert sorted(parameter.shape for parameter in trace.workload.parameters) == [
        (64,),
        (64, 1024),
        (1024,),
        (1024, 512),
    ]
    assert imported.to_json()["buckets_bytes"] == [
        sum(trace.sizes_bytes[index] for index in bucket) for bucket in trace.layouts[0]
    ]
    assert len(trace.layouts[0]) >= 2
    assert message is None or any(re.search(message, note) for note in imported.notes)


def test_several_backward_passes_in_a_step_are_refused(two_ranks, tmp_path):
    two_ranks.run(bodies.profile_variant, {"passes": 2}, str(tmp_path))
    with pytest.raises(TraceError, match=r"expected one backward pass in each step, got 2 in step"):
        import_profile(sorted(tmp_path.glob("*.json")))


# Real files, with facts that were read off them by other means

PROFILES = Path(__file__).parent.parent / "validation" / "profiler"


def test_the_steps_of_resnet50_on_an_a100_that_waits_for_its_host():
    report = import_profile([PROFILES / "a100x2_resnet50_rank0.json.gz"]).to_json()
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
    imported = import_profile([PROFILES / "v100x1_resnet50_rank0.json.gz"])
    report = imported.to_json()
    assert (report["gpu"], report["world_size"], report["steps"]) == ("Tesla V100-SXM2-32GB", 1, 5)
    spans = [one.ready_ns[0] - one.ready_ns[-1] for one in imported.trace.ranks[0].iterations[2:]]
    assert spans == pytest.approx([95.572e6 - 32.465e6, 95.660e6 - 32.315e6, 95.399e6 - 32.383e6], abs=2e4)
    assert report["host_bound"] < 0.05
    assert not any(map(any, report["all_reduce_ns"]))


def test_the_buckets_of_a_model_with_parameters_outside_its_data_parallelism():
    imported = import_profile([PROFILES / "a100x8_recommendation_rank3.json.gz"])
    report = imported.to_json()
    assert (report["world_size"], report["ranks"], report["steps"], report["gradients"]) == (8, [3], 6, 256)
    assert report["buckets_bytes"] == [181240752, 1068160, 17728292]
    buckets = [sum(imported.trace.sizes_bytes[index] for index in bucket) for bucket in imported.trace.layouts[0]]
    assert buckets == report["buckets_bytes"]
    assert any(
        note.startswith("3 gradients were accumulated after the last bucket was launched") for note in imported.notes
    )


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


@examples(200)
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got an empty file"),
        ("{}", "got Object missing required field `traceEvents`"),
        ('{"traceEvents": []}', "expected events of torch's profiler, got 0 events"),
        ('{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1}]}', "expected training steps, got no"),
        (
            '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "ProfilerStep#1", "ts": 1, "dur": 9}]}',
            "expected events named torch::autograd::AccumulateGrad",
        ),
    ],
)
def test_a_file_without_training_steps_is_told_in_one_line(tmp_path, text, message):
    path = tmp_path / "rank0.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=message) as raised:
        import_profile([path])
    assert str(raised.value).startswith(str(path))


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
