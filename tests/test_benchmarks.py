"""The benchmark of the simulator: a missed goal fails the command, which names the goal."""

import math
import sys

import pandas as pd
import pytest

from benchmarks import simulator as benchmark
from benchmarks.simulator import Goal


def test_a_missed_goal_ends_the_command_with_its_name_and_a_reached_one_does_not(monkeypatch, tmp_path, capsys):
    """Without the part that takes minutes."""
    goals = [Goal("easy", math.inf, runs=2, action=int), Goal("in no time at all", 0, runs=2, action=int)]
    rows = pd.DataFrame(
        {"along": ["ranks", "buckets"], "size": [1, 1], "engine": ["events"] * 2, "seconds": [1.0] * 2}
    )
    monkeypatch.setattr(benchmark, "goals", lambda _trace: iter(goals))
    monkeypatch.setattr(benchmark, "scaling", lambda _trace: rows)
    monkeypatch.setattr(sys, "argv", ["simulator", "--out", str(tmp_path / "speed")])
    with pytest.raises(SystemExit, match=r"^missed: in no time at all$"):
        benchmark.main()
    assert "easy" in capsys.readouterr().out
    assert (tmp_path / "speed.png").exists()
