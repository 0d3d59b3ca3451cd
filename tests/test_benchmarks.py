"""The benchmark of the simulator: a missed goal fails the command, which names the goal."""

import math
import sys

import pandas as pd
import pytest

from benchmarks import simulator as benchmark
from benchmarks.simulator import Goal

REACHED = Goal("easy", math.inf, runs=2, action=int)
MISSED = Goal("in no time at all", 0, runs=2, action=int)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the command with the given goals, and without the part that takes minutes."""

    def run(*goals: Goal) -> None:
        rows = pd.DataFrame(
            {"along": ["ranks", "buckets"], "size": [1, 1], "engine": ["events"] * 2, "seconds": [1.0] * 2}
        )
        monkeypatch.setattr(benchmark, "goals", lambda _trace: iter(goals))
        monkeypatch.setattr(benchmark, "scaling", lambda _trace: rows)
        monkeypatch.setattr(sys, "argv", ["simulator", "--out", str(tmp_path / "speed")])
        benchmark.main()

    return run


def test_a_missed_goal_ends_the_command_with_its_name(run, tmp_path):
    with pytest.raises(SystemExit, match=r"^missed: in no time at all$"):
        run(REACHED, MISSED)
    assert (tmp_path / "speed.png").exists()


def test_reached_goals_are_printed_and_do_not_end_the_command(run, capsys):
    run(REACHED)
    assert "easy" in capsys.readouterr().out
