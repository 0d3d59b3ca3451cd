"""Readers: a damaged file of any kind is read rightly, or told in one line that names the file."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ddplab.conformance import timing_and_overlap
from ddplab.conformance.check_outcomes import read_expectations
from ddplab.learn.rungs import Progress, load_progress
from ddplab.reference.files.reading import Schema
from ddplab.reference.files.value_ranges import YEAR_NS
from ddplab.reference.trace import Trace
from ddplab.simulator import Fabric, Prediction, predict, tune
from ddplab.simulator.capacity.scaling import read_prices
from ddplab.simulator.fabric import Linear, Processor
from ddplab.simulator.profiler_import.profiler_events import read_profiler_file
from ddplab.simulator.tuning.bucket_plan import BucketPlan
from ddplab.simulator.workload.roofline import GradientOperations, Operation, Operations, data_sheets, find_device
from ddplab.simulator.workload.trace_synthesis import synthesize

from .explore import examples
from .hostile_files import corpus
from .nccl_log import as_csv, as_json, nccl_log, rccl_records
from .strategies import iteration, trace_of

TRACE = trace_of([[iteration(30, (80, None), 90, 10)] * 2], [400, 8], [16])
OPERATIONS = Operations(
    model="m",
    torch_version="2",
    parameters=TRACE.workload.parameters,
    forward=(Operation(flops=10, bytes_moved=4),),
    gradients=tuple(GradientOperations(parameter=index, operations=()) for index in (1, 0)),
    step=(),
)
V100 = data_sheets()["v100-fp32"]
FABRIC = Fabric.from_table([(2, 0, 5), (2, 64, 9)]).model_copy(
    update={"processor": Processor(launch_ns=3, pack=Linear(fixed_ns=2), slow_down=1.5)}
)
TOPOLOGY = {
    "source": "a data sheet",
    "levels": {
        "nvlink": {"members": 8, "latency_us": 3, "gb_per_s": 200},
        "nic": {"of": "nvlink", "latency_us": 10, "gb_per_s": 50},
    },
}
SCHEDULE = timing_and_overlap.EmulatedSchedule(
    model="m",
    network="n",
    iteration_ns=10,
    exposed_ns=2,
    last_ready_ns=7,
    launches=(timing_and_overlap.EmulatedLaunch(size_bytes=4, launched_ns=3, done_ns=6),),
    other_collectives=1,
)

US = {2**power: 20.0 + power for power in range(10, 20)}
EVENT = {
    "ph": "X",
    "cat": "cpu_op",
    "name": "aten::mm",
    "pid": 1,
    "tid": 1,
    "ts": 1.0,
    "dur": 2.0,
    "args": {"dtype": "x"},
}
PROFILE = {
    "traceEvents": [EVENT, EVENT | {"ts": 5.5}],
    "deviceProperties": [{"name": "d"}],
    "distributedInfo": {"rank": 0},
}

READERS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "trace": (".json", Trace.load, TRACE.model_dump_json()),
    "fabric": (".json", Fabric.load, FABRIC.model_dump_json()),
    "data sheet": (".json", lambda path: find_device(str(path)), V100.model_dump_json()),
    "topology": (".yaml", Fabric.load, yaml.safe_dump(TOPOLOGY)),
    "log": (".log", Fabric.load, nccl_log(4, US)),
    "schedules": (
        ".json",
        timing_and_overlap.load,
        timing_and_overlap.ScheduleFile(subject="m:C", schedules=(SCHEDULE,)).model_dump_json(),
    ),
    "expectations": (
        ".yaml",
        lambda path: read_expectations(path, ["one weight", "overlap"], "m:C"),
        yaml.safe_dump({"class": "m:C", "must-pass": ["one weight"], "expected-fail": ["overlap"], "skip": []}),
    ),
    "progress": (
        ".progress.json",
        lambda path: load_progress(path.with_name(path.name.replace(".progress.json", ".py"))),
        Progress(passed=2, hints={3: 1}, iteration_ms={1: 283.8, 2: 239.0}).model_dump_json(),
    ),
    "results": (".json", Fabric.load, as_json(US, 8)),
    "records": (".json", Fabric.load, json.dumps(rccl_records(US, 8))),
    "records in a table": (".csv", Fabric.load, as_csv(rccl_records(US, 8))),
    "prices": (".csv", read_prices, "system,per_gpu_hour,currency,source,date\nx,2.5,USD,a list,2026-11-28\n"),
    "plan": (
        ".json",
        BucketPlan.load,
        tune(TRACE, FABRIC, world_size=2, find_unused_parameters=True).model_dump_json(),
    ),
    "profile": (".json", read_profiler_file, json.dumps(PROFILE)),
}
"""Ending, reader and valid text of each kind of file."""
EXTREMES = (0, -1, 1, 10**6, 10**18, 2**62, 2**63, 10**30, 1e-300, 1e-7, 1e6, 1e18, 1e30, 1e300)
VALUES = st.recursive(
    st.sampled_from(EXTREMES)
    | st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@st.composite
def damaged(draw, text: str) -> bytes:
    """The text cut off, with other bytes, with a line twice or missing, or with another value somewhere."""
    match draw(st.sampled_from(["cut", "bytes", "lines", "value", "value", "value"])):
        case "cut":
            return text[: draw(st.integers(0, len(text) - 1))].encode()
        case "bytes":
            changed = bytearray(text.encode())
            for place in draw(st.lists(st.integers(0, len(changed) - 1), min_size=1, max_size=5)):
                changed[place] = draw(st.integers(0, 255))
            return bytes(changed)
        case "lines":
            lines = text.splitlines(keepends=True)
            place = draw(st.integers(0, len(lines) - 1))
            return "".join(
                [*lines[:place], *lines[place : place + 1] * draw(st.sampled_from([0, 2])), *lines[place + 1 :]]
            ).encode()
        case _:
            return draw(with_another_value(text))


@st.composite
def with_another_value(draw, text: str) -> bytes:
    """The text with another value of one field, or without the field."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError:
        return text.replace(draw(st.sampled_from(text.split())), draw(st.text(max_size=5)), 1).encode()
    target = document
    while isinstance(target, dict | list) and target:
        keys = sorted(target) if isinstance(target, dict) else range(len(target))
        key = draw(st.sampled_from(keys))
        if isinstance(target[key], dict | list) and target[key] and draw(st.integers(0, 9)):
            target = target[key]
        elif draw(st.integers(0, 9)):
            target[key] = draw(VALUES)
            break
        else:
            del target[key]
            break
    return (json.dumps(document) if text.startswith(("{", "[")) else yaml.safe_dump(document)).encode()


@pytest.mark.parametrize("kind", READERS)
def test_the_text_that_is_damaged_below_is_valid(tmp_path, kind):
    ending, read, text = READERS[kind]
    path = tmp_path / f"file{ending}"
    path.write_text(text)
    assert read(path) is not None


@pytest.mark.parametrize("kind", READERS)
@examples(15)
@given(data=st.data())
def test_a_damaged_file_is_read_or_told_in_one_line(tmp_path_factory, kind, data):
    ending, read, text = READERS[kind]
    path = tmp_path_factory.getbasetemp() / f"damaged{ending}"
    path.write_bytes(data.draw(damaged(text)))
    try:
        found = read(path)
    except ValueError as error:
        message = str(error)
        assert "\n" not in message
        assert str(path) in message
        return
    assert found is not None


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["json", "nccl.json", "log", "yaml", "csv"])
def test_a_hostile_file_takes_time_and_memory_in_proportion_and_is_told_in_one_line(tmp_path, kind):
    """Below 5 s of the processor and 500 MiB for each file of 100 KB."""
    for name, content in corpus():
        if name.partition(".")[2] == kind:
            (tmp_path / name).write_bytes(content)
    command = [sys.executable, "-m", "tests.hostile_files", tmp_path]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


USES: dict[str, Callable[[Any], Prediction]] = {
    "trace": lambda trace: predict(trace, FABRIC, world_size=2, find_unused_parameters=True),
    "fabric": lambda fabric: predict(TRACE, fabric, world_size=2, find_unused_parameters=True),
    "topology": lambda fabric: predict(TRACE, fabric, world_size=16, find_unused_parameters=True),
    "log": lambda fabric: predict(TRACE, fabric, world_size=4, find_unused_parameters=True),
    "data sheet": lambda device: predict(synthesize(OPERATIONS, device), FABRIC, world_size=2),
}
"""A prediction with what a reader returned."""


@pytest.mark.parametrize("kind", USES)
@examples(30)
@given(data=st.data())
def test_another_value_is_told_in_one_line_or_predicted_in_order(tmp_path_factory, kind, data):
    ending, read, text = READERS[kind]
    path = tmp_path_factory.getbasetemp() / f"changed{ending}"
    path.write_bytes(data.draw(with_another_value(text)))
    try:
        with np.errstate(all="raise"):
            found = USES[kind](read(path))
    except ValueError as error:
        refusal = str(error)
        assert "\n" not in refusal
        return
    assert 0 <= found.compute_ns <= found.iteration_ns <= YEAR_NS
    assert 0 <= found.interval_ns[0] <= found.iteration_ns <= found.interval_ns[1]


def schemas(base: type[Schema] = Schema) -> list[type[Schema]]:
    """All classes of files and settings that are imported."""
    return [each for one in base.__subclasses__() for each in (one, *schemas(one))]


def test_a_record_with_a_wrong_field_is_a_value_error_of_one_line():
    """In Python too: `Trace()` had a line of pydantic's for each field and one for its address."""
    names = {one.__name__ for one in schemas()}
    assert {"Trace", "Workload", "Fabric", "Topology", "Level", "Policy", "CommHook", "Price"} <= names
    for one in (each for each in schemas() if each.model_config["extra"] == "forbid"):
        with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
            one(**{"no such field": "\n"})
        assert type(caught.value) is ValueError
