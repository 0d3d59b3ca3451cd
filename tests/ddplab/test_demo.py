"""The demo: its trace, and the reducer that takes the predicted time to the nanosecond."""

import json

from ddplab import demo
from ddplab.reference.trace import Trace
from ddplab.simulator.baseline_predictions import BASELINES
from figures.traces_and_fabrics import resnet50


def test_its_trace_is_the_one_of_the_figures():
    recorded, figures = Trace.load(demo.TRACE), resnet50()
    assert recorded.ranks == figures.ranks
    assert recorded.workload.parameters == figures.workload.parameters


def test_in_virtual_time_reducer_and_prediction_agree_to_the_nanosecond(printed, tmp_path):
    shown = printed("demo", "--out", tmp_path)
    rows = json.loads((tmp_path / "demo.json").read_text())["rows"]
    assert [row["predicted_ns"] - row["reducer_ns"] for row in rows] == [0] * len(demo.POLICIES)
    assert "largest difference between the reducer and the prediction: 0 ns" in shown
    assert all(set(row["baselines_ns"]) == set(BASELINES) for row in rows)
    assert len({row["reducer_ns"] for row in rows}) > 3
    assert (tmp_path / "perfetto.json").exists()
