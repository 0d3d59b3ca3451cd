"""The Chakra export, read back by a small decoder: sizes, durations and dependencies are those of the prediction."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator import Fabric, Straggler, predict
from ddplab.simulator.engines.closed_form import simulate
from ddplab.simulator.engines.timeline import EngineInput
from ddplab.simulator.results.chakra_export import _varint, chakra_traces

from ..strategies import engine_inputs, iteration, trace_of

US = 1_000
COMPUTE, COLLECTIVE, ALL_REDUCE = 4, 7, 0
INT64, BOOL = 9, 27


def number_at(data: bytes, at: int) -> tuple[int, int]:
    """Decode a varint; return it and the place after it."""
    value = shift = 0
    while True:
        value, shift, at = value | (data[at] & 0x7F) << shift, shift + 7, at + 1
        if data[at - 1] < 0x80:
            return value, at


def message(data: bytes) -> dict[int, list[Any]]:
    """Decode a message: by number of the field, its values, which are integers or bytes."""
    fields, at = defaultdict(list), 0
    while at < len(data):
        tag, at = number_at(data, at)
        assert tag & 7 in (0, 2), "only varints and delimited fields are in the schema's part that we use"
        value, at = number_at(data, at)
        if tag & 7 == 2:
            assert at + value <= len(data)
            value, at = data[at : at + value], at + value
        fields[tag >> 3].append(value)
    return fields


def nodes_of(file: bytes) -> list[dict[str, Any]]:
    """Decode a file as the schema's messages: the metadata, which has a version, and nodes."""
    messages, at = [], 0
    while at < len(file):
        length, at = number_at(file, at)
        messages.append(message(file[at : at + length]))
        at += length
    assert at == len(file)
    assert messages[0] == {1: [b"0.0.4"]}
    nodes = []
    for one in messages[1:]:
        node = {"id": one[1][0], "name": one[2][0].decode(), "type": one[3][0], "us": one[7][0], "after": one[5]}
        for attribute in map(message, one[10]):
            name = attribute.pop(1)[0].decode()
            ((kind, (value,)),) = attribute.items()
            assert kind == (BOOL if name == "is_cpu_op" else INT64), f"{name} has a value of another type"
            node[name] = value
        nodes.append(node)
    return nodes


@given(st.integers(0, 2**64 - 1))
def test_an_integer_is_read_back_from_at_most_ten_bytes(value):
    assert number_at(_varint(value), 0) == (value, len(_varint(value)))
    assert len(_varint(value)) <= 10


def in_microseconds(drawn: EngineInput) -> EngineInput:
    """Return the iteration a thousand times as long, whose times are whole microseconds."""
    return replace(drawn, duration_ns=drawn.duration_ns * US, cost_ns=drawn.cost_ns * US)


@given(engine_inputs())
def test_sizes_and_durations_add_up_to_those_of_the_prediction(drawn):
    files = [nodes_of(file) for file in chakra_traces(drawn)]
    assert len(files) == len(drawn.represented_by)
    for nodes, simulated in zip(files, drawn.represented_by.tolist(), strict=True):
        assert [node["id"] for node in nodes] == list(range(1, len(nodes) + 1))
        assert all(before < node["id"] for node in nodes for before in node["after"])
        assert not any(node["is_cpu_op"] for node in nodes)
        computed_us = sum(node["us"] for node in nodes if node["type"] == COMPUTE)
        computed_ns = drawn.duration_ns[drawn.ranks.index(simulated)].sum()
        assert abs(computed_us * US - computed_ns) <= US / 2
        sent = [node for node in nodes if node["type"] == COLLECTIVE]
        assert [node["comm_size"] for node in sent] == [one.size_bytes for one in drawn.schedule.collectives]
        assert [node["us"] for node in sent] == [round(ns / US) for ns in drawn.cost_ns.tolist()]


@given(engine_inputs())
def test_a_replay_of_all_files_takes_exactly_as_long_as_the_simulated_iteration(drawn):
    """A dependency that is missing or wrong would change the end."""
    one_at_a_time = replace(in_microseconds(drawn), concurrency=1, slow_down=1.0)
    files = [nodes_of(file) for file in chakra_traces(one_at_a_time)]
    assert replayed_us(files) * US == simulate(one_at_a_time).iteration_ns


def replayed_us(files: list[list[dict[str, Any]]]) -> int:
    """Return the end of a replay in which a node starts after those that it depends on, collectives on all ranks."""
    ends: list[list[int]] = [[0] for _ in files]  # by rank and id

    def ready(rank: int, node: dict[str, Any]) -> int:
        return max((ends[rank][before] for before in node["after"]), default=0)

    todo = [iter(nodes) for nodes in files]
    waiting: list[Any] = [None] * len(files)
    while True:
        for rank, nodes in enumerate(todo):
            waiting[rank] = None
            for node in nodes:
                if node["type"] == COLLECTIVE:
                    waiting[rank] = node
                    break
                ends[rank].append(ready(rank, node) + node["us"])
        if None in waiting:
            assert waiting == [None] * len(files), "each rank has all collectives"
            return max(max(of_rank) for of_rank in ends)
        start = max(ready(rank, node) for rank, node in enumerate(waiting))
        for rank, node in enumerate(waiting):
            ends[rank].append(start + node["us"])


def test_files_of_all_ranks_are_saved_with_the_prefix(tmp_path):
    trace = trace_of([[iteration(3_000_000, (7_000_000, 5_000_300), 9_000_000, 200_000)]], [4_000_000, 4_000_000])
    fabric, slow = Fabric.from_alpha_beta(alpha_ns=100_000, bytes_per_s=1e9), [Straggler(rank=1, factor=2)]
    prediction = predict(trace, fabric, world_size=3, stragglers=slow, bucket_cap_mb=1, assume=False)
    prediction.save_chakra(tmp_path / "new" / "step")
    assert len(list((tmp_path / "new").iterdir())) == 3
    files = [nodes_of((tmp_path / "new" / f"step.{rank}.et").read_bytes()) for rank in range(3)]
    assert [[node["us"] for node in nodes if node["type"] == COMPUTE] for nodes in files] == [
        [5_000, 2_000, 2_000, 200],
        [10_001, 3_999, 4_000, 400],
        [5_000, 2_000, 2_000, 200],
    ]
    sent = [node for node in files[0] if node["type"] == COLLECTIVE]
    assert [(node["comm_type"], node["comm_size"]) for node in sent] == [(ALL_REDUCE, 4_000_000)] * 2
    assert files[0][-1]["after"] == [5, 2, 4]
