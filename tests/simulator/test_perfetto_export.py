"""The Perfetto export: the rules of the format, and a process for every rank."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.trace import Trace
from ddplab.simulator import Fabric, Straggler, predict
from ddplab.simulator.fabric import Processor
from ddplab.simulator.results.perfetto_export import MOST_PROCESSES, chrome_trace

from ..strategies import caps_mb, iteration, trace_of, traces

FABRIC = Fabric.from_alpha_beta(alpha_ns=100, bytes_per_s=1e9, concurrency=2)
FABRIC = FABRIC.model_copy(update={"processor": Processor(launch_ns=7)})
TWO_KINDS = trace_of([[iteration(3, (7, 5), 9, 2)], [iteration(4, (8, 6), 10, 2)]], [4, 4])


@given(traces(), caps_mb(), st.integers(1, 4))
def test_a_timeline_follows_the_rules_of_its_format(trace, cap, world_size):
    prediction = predict(trace, FABRIC, world_size=world_size, bucket_cap_mb=cap)
    events = json.loads(json.dumps(chrome_trace(prediction.timeline)))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    named = {(event["pid"], event.get("tid")) for event in events if event["ph"] == "M"}
    assert {(event["pid"], event["tid"]) for event in slices} <= named
    for track in named:  # slices of one track must not overlap
        times = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if (e["pid"], e["tid"]) == track)
        assert all(before[1] <= after[0] + 1e-9 for before, after in itertools.pairwise(times))
    starts, ends = ([event["id"] for event in events if event["ph"] == end] for end in "sf")
    assert sorted(starts) == sorted(ends)
    assert len(set(starts)) == len(starts) == world_size * len(prediction.buckets) * (world_size > 1)
    for rank in range(world_size):  # all bytes in flight arrive
        counted = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == rank]
        assert min(counted) >= 0
        assert counted[-1] == 0


@given(traces(), st.integers(1, 7), st.data())
def test_a_rank_that_was_not_simulated_is_shown_as_if_it_had_been(trace, world_size, data):
    """A trace with a recording for every rank leaves none out."""
    slow = data.draw(st.lists(st.integers(0, world_size - 1), max_size=2))
    inputs = data.draw(st.none() | st.lists(st.integers(1, 2), min_size=world_size, max_size=world_size))
    settings = {"stragglers": [Straggler(rank=rank, factor=2) for rank in slow], "inputs": inputs}
    folded = predict(trace, FABRIC, world_size=world_size, **settings)
    each = predict(_repeated(trace, world_size), FABRIC, world_size=world_size, **settings)
    assert each.timeline.engine_input.ranks == tuple(range(world_size))
    assert chrome_trace(folded.timeline) == chrome_trace(each.timeline)


def _repeated(trace: Trace, world_size: int) -> Trace:
    recorded = itertools.islice(itertools.cycle(trace.ranks), world_size)
    ranks = tuple(one.model_copy(update={"rank": rank}) for rank, one in enumerate(recorded))
    return trace.model_copy(update={"ranks": ranks})


@pytest.mark.parametrize(
    ("world_size", "settings", "names"),
    [
        (MOST_PROCESSES, {}, [f"rank {rank}" for rank in range(MOST_PROCESSES)]),
        (100, {}, ["rank 0 (50 alike: 0, 2, 4, ...)", "rank 1 (50 alike: 1, 3, 5, ...)"]),
        (
            100, {"stragglers": [Straggler(rank=98, factor=2)], "inputs": [2, 2, 1] + 97 * [2]},
            ["rank 0 (48 alike: 0, 4, 6, ...)", "rank 1 (50 alike: 1, 3, 5, ...)", "rank 2", "rank 98"],
        ),
    ],
)  # fmt: skip
def test_every_rank_has_a_process_up_to_a_limit_beyond_which_equal_ones_share_one(world_size, settings, names):
    """A rank that is slow or runs out of inputs has no equal."""
    events = chrome_trace(predict(TWO_KINDS, FABRIC, world_size=world_size, **settings).timeline)["traceEvents"]
    found = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {event["pid"] for event in events if event["ph"] == "X"} == set(found)
    assert [found[pid] for pid in sorted(found)] == names


def test_a_timeline_is_saved_in_a_new_folder(tmp_path):
    predict(TWO_KINDS, FABRIC, world_size=2).save_perfetto(tmp_path / "new" / "timeline.json")
    assert json.loads((tmp_path / "new" / "timeline.json").read_text())["displayTimeUnit"] == "ns"
