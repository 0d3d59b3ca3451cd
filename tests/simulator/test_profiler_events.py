"""Events of torch's profiler: files without them are refused in one line."""

import pytest

from ddplab.reference.errors import TraceError
from ddplab.simulator import import_profile

from . import profiler_files
from .profiler_files import SMALL, write


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


EMPTY_STEP = '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "ProfilerStep#1", "ts": 1, "dur": 9}]}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got an empty file"),
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
