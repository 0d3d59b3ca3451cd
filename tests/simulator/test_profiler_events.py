"""Events of torch's profiler: files without them are refused in one line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.errors import TraceError
from ddplab.simulator import import_profile

from . import profiler_files
from .profiler_files import SMALL, scripts, write


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


@given(scripts(), st.integers(2 * 10**6, 10**9))
def test_kernels_before_their_launches_are_refused(tmp_path, script, early_ns):
    """A GPU whose clock is behind that of its host had no forward pass and no backward pass."""
    document, _ = profiler_files.profile(script)
    for one in document["traceEvents"]:
        if "stream" in one["args"]:
            one["ts"] -= early_ns / 1e3
    with pytest.raises(TraceError, match="the clocks of the GPU and of its host differ"):
        import_profile([write(document, tmp_path / "rank0.json")])


@pytest.mark.parametrize("name", ["ts", "dur"])
@pytest.mark.parametrize("place", [0, -1])
def test_a_time_that_is_not_a_number_is_refused_with_its_file(tmp_path, name, place):
    document, _ = profiler_files.profile(SMALL)
    [one for one in document["traceEvents"] if one["ph"] == "X"][place][name] = "nan"
    with pytest.raises(TraceError, match=r"rank0.json: expected events of 0 us or longer in a million"):
        import_profile([write(document, tmp_path / "rank0.json")])


@given(scripts(), st.floats(-1e9, -1e-6) | st.just("-1"), st.data())
def test_a_negative_duration_is_refused(tmp_path, script, duration, data):
    """It counted as 0, and a file of such kernels had a fast GPU."""
    document, _ = profiler_files.profile(script)
    data.draw(st.sampled_from([one for one in document["traceEvents"] if one["ph"] == "X"]))["dur"] = duration
    with pytest.raises(TraceError, match=r"expected events of 0 us or longer in [^\n]*$"):
        import_profile([write(document, tmp_path / "rank0.json")])


EMPTY_STEP = '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "ProfilerStep#1", "ts": 1, "dur": 9}]}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got an empty file"),
        ("[]", "got `array`; export it again"),
        ("{}", "got Object missing required field `traceEvents`"),
        ('{"traceEvents": []}', "expected events of torch's profiler, got 0 events"),
        ('{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1}]}', "expected training steps, got no"),
        (EMPTY_STEP, "expected events named torch::autograd::AccumulateGrad"),
    ],
)
def test_a_file_without_training_steps_is_told_in_one_line(tmp_path, text, message):
    path = tmp_path / "rank0.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=message) as raised:
        import_profile([path])
    assert str(raised.value).startswith(str(path))
    assert str(raised.value).count("got ") == 1
