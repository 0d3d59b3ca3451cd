"""Readers: a damaged file of any kind is read rightly, or told in one line that names the file."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from reference.conformance.report import read_expectations
from reference.trace import Trace
from simulator import Fabric
from simulator.conformance import overlap
from simulator.fabric import Contention, Linear, Processor
from simulator.workload.roofline import DEVICES, Device, Gradient, Operation, Operations

from .explore import examples
from .nccl_log import nccl_log
from .strategies import iteration, trace_of

TRACE = trace_of([[iteration(30, (80, None), 90, 10)] * 2], [400, 8], [16])
OPERATIONS = Operations(
    model="m",
    torch_version="2",
    parameters=TRACE.workload.parameters,
    forward=(Operation(flops=10, bytes_moved=4),),
    gradients=tuple(Gradient(parameter=index, operations=()) for index in (1, 0)),
    step=(),
)
FABRIC = Fabric.from_table([(2, 0, 5), (2, 64, 9)]).model_copy(
    update={"processor": Processor(launch_ns=3, pack=Linear(fixed_ns=2), contention=(Contention(compute=1.5),))}
)
TOPOLOGY = {
    "source": "a data sheet",
    "levels": {
        "nvlink": {"members": 8, "latency_us": 3, "gb_per_s": 200},
        "nic": {"of": "nvlink", "latency_us": 10, "gbit_per_s": 400},
    },
}
SCHEDULE = overlap.Schedule(
    model="m",
    network="n",
    iteration_ns=10,
    exposed_ns=2,
    last_ready_ns=7,
    launches=(overlap.Launch(size_bytes=4, launched_ns=3, done_ns=6),),
    other_collectives=1,
)
SCHEDULES = overlap.ScheduleFile(subject="m:C", schedules=(SCHEDULE,))

READERS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "trace": (".json", Trace.load, TRACE.model_dump_json()),
    "fabric": (".json", Fabric.load, FABRIC.model_dump_json()),
    "operations": (".json", Operations.load, OPERATIONS.model_dump_json()),
    "data sheet": (".json", Device.load, DEVICES["v100-fp32"].model_dump_json()),
    "topology": (".yaml", Fabric.load, yaml.safe_dump(TOPOLOGY)),
    "log": (".log", Fabric.load, nccl_log(4, {2**power: 20.0 + power for power in range(10, 20)})),
    "schedules": (
        ".json",
        overlap.load,
        overlap.ScheduleFile(subject="m:C", schedules=(SCHEDULE,)).model_dump_json(),
    ),
    "expectations": (
        ".yaml",
        lambda path: read_expectations(path, ["one weight", "overlap"]),
        yaml.safe_dump({"must-pass": ["one weight"], "expected-fail": ["overlap"], "skip": []}),
    ),
}
"""Ending, reader and valid text of each kind of file."""
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
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
            try:
                document = yaml.safe_load(text)
            except yaml.YAMLError:
                return text.replace(draw(st.sampled_from(text.split())), draw(st.text(max_size=5)), 1).encode()
            target = document
            while True:
                if not isinstance(target, dict | list) or not target:
                    break
                keys = sorted(target) if isinstance(target, dict) else range(len(target))
                key = draw(st.sampled_from(keys))
                if isinstance(target[key], dict | list) and target[key] and draw(st.integers(0, 9)):
                    target = target[key]
                    continue
                if draw(st.booleans()):
                    target[key] = draw(VALUES)
                else:
                    del target[key]
                break
            return (json.dumps(document) if text.startswith("{") else yaml.safe_dump(document)).encode()


@pytest.mark.parametrize("kind", READERS)
def test_the_text_that_is_damaged_below_is_valid(tmp_path, kind):
    ending, read, text = READERS[kind]
    path = tmp_path / f"file{ending}"
    path.write_text(text)
    assert read(path) is not None


@pytest.mark.parametrize("kind", READERS)
@examples(60)
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
