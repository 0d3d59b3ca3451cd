"""Trace files: a saved trace loads equal, and errors name the file, the field and the reason."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.errors import TraceError
from ddplab.reference.trace import Parameter, Trace

from ..strategies import traces

PARAMETER = {"name": "weight", "shape": [2], "dtype": "float32", "size_bytes": 8, "sparse": False}
ITERATION = {
    "forward_start_ns": 0,
    "forward_end_ns": 10,
    "backward_start_ns": 12,
    "backward_end_ns": 30,
    "optimizer_start_ns": 31,
    "optimizer_end_ns": 35,
    "end_ns": 40,
    "synchronized": True,
    "layout": 0,
    "ready_ns": [20],
    "buckets": [{"ready_ns": 21, "launched_ns": 22, "done_ns": 25, "copied_out_ns": 28}],
}
DOCUMENT = {
    "schema_version": 1,
    "workload": {
        "model": "tiny",
        "source": "ddplab",
        "parameters": [PARAMETER],
        "buffers": [],
        "device": "cpu",
        "device_name": "a processor",
        "backend": "gloo",
        "world_size": 1,
        "torch_version": "2.13.0",
        "batch": None,
    },
    "layouts": [[[0]]],
    "ranks": [{"rank": 0, "clock_offset_ns": 0, "clock_uncertainty_ns": 0, "iterations": [ITERATION]}],
}


@given(traces())
def test_what_is_saved_is_loaded(tmp_path_factory, trace):
    folder = tmp_path_factory.mktemp("traces")
    for name in ("trace.json", "trace.json.gz"):
        trace.save(folder / name)
        assert Trace.load(folder / name) == trace


def test_equal_traces_give_equal_bytes(tmp_path):
    trace = Trace.model_validate_json(json.dumps(DOCUMENT))
    trace.save(tmp_path / "a.json.gz")
    trace.save(tmp_path / "b.json.gz")
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


@given(traces(), st.integers(-(10**9), 10**9))
def test_shifting_there_and_back_changes_nothing(trace, by_ns):
    for rank in trace.ranks:
        for iteration in rank.iterations:
            assert iteration.shifted(by_ns).shifted(-by_ns) == iteration


ITERATION_PATH = ("ranks", 0, "iterations", 0)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("schema_version",), 2, "schema_version: expected 1, got 2"),
        (("workload", "parameters"), [], "workload: parameters: expected at least one"),
        (("workload", "parameters"), [PARAMETER, PARAMETER], "the name 'weight' occurs twice"),
        (("ranks", 0, "rank"), 1, "ranks: expected ranks below 1 in order, each once, got [1]"),
        (("layouts", 0), [[0], [0]], "layouts[0]: buckets: parameters [0] are in more than one bucket"),
        (("layouts", 0), [[1]], "layouts[0]: buckets: expected parameter indices 0 to 0, got [1]"),
        ((*ITERATION_PATH, "forward_start_ns"), 11, "forward_end_ns: expected at least forward_start_ns = 11"),
        ((*ITERATION_PATH, "end_ns"), 34, "end_ns: expected at least optimizer_end_ns = 35, got 34"),
        ((*ITERATION_PATH, "end_ns"), 40.0, "ranks[0].iterations[0].end_ns: input should be a valid integer"),
        ((*ITERATION_PATH, "ready_ns"), [31], "ready_ns[0]: expected a time within the backward pass (12 to 30)"),
        ((*ITERATION_PATH, "ready_ns"), [20, 21], "ready_ns: expected 1 entries, one for each parameter, got 2"),
        (("ranks", 0, "iterations"), [ITERATION, ITERATION], "expected at least the end of the iteration before, 40"),
        (
            ("workload", "parameters", 0, "size_bytes"),
            7,
            "expected a multiple of the 2 elements of shape (2,), got 7",
        ),
        ((*ITERATION_PATH, "layout"), 1, "layout: expected an index into 1 layouts, got 1"),
        ((*ITERATION_PATH, "buckets"), [], "buckets: expected 1 entries, one for each bucket, got 0"),
        ((*ITERATION_PATH, "buckets", 0, "done_ns"), 21, "expected ready <= launched <= done <= copied out"),
    ],
)
def test_an_inconsistent_file_names_file_field_and_reason(tmp_path, path, value, says):
    document = json.loads(json.dumps(DOCUMENT))
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(document))
    with pytest.raises(TraceError, match=re.escape(says)) as caught:
        Trace.load(file)
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    assert "\n" not in message


@given(st.integers(1, 100_000), st.data())
def test_a_fraction_of_the_rows_touches_as_many_rows_as_it_was_made_from(rows, data):
    touched = data.draw(st.integers(1, rows))
    parameter = Parameter(name="weight", shape=(rows, 1), dtype="float32", size_bytes=4 * rows, sparse=True)
    assert parameter.touched_rows(touched / rows) == touched
