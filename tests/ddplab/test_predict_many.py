"""The command `predict` for several traces, fabrics and world sizes: table, heat map and verdicts."""

import json

import pandas as pd
import pytest

from ddplab.cli.predict_many import heat_map_axes, verdicts
from simulator.sweep import AXES


def test_several_fabrics_and_world_sizes_are_a_table_and_a_heat_map(here, trace, fabric, topology, tmp_path):
    done = here(
        *("predict", trace, "--fabric", f"{fabric},{topology}", "--world-size", "2,4", "--caps", "0.01,single"),
        *("--hooks", "none,power_sgd:2", "--set", "sync_every=2", "--straggler", "1:1.5"),
        *("--set", "kind=fitted", "--set", "iterations=5", "--heat-map", tmp_path / "h.svg"),
        *("--json", tmp_path / "j"),
    )
    assert done.returncode == 0, done.stderr
    assert "the fastest configuration at each world size" in done.stdout
    rows = json.loads((tmp_path / "j").read_text())["rows"]
    assert len(rows) == 16
    assert [row["bucket_cap_mb"] for row in rows[:3]] == [0.01, 0.01, None]
    assert {row["fabric"] for row in rows} == {str(fabric), str(topology)}
    picture = (tmp_path / "h.svg").read_text()
    assert all(f"<!-- {word} -->" in picture for word in ("fabric", "ranks"))


def test_logs_are_merged_with_each_of_several_links(here, trace, logs, topology, tmp_path):
    (tmp_path / "other.yaml").write_text(topology.read_text())
    done = here(
        *("predict", trace, "--fabric", logs[0], "--fabric", f"{topology},{tmp_path / 'other.yaml'}"),
        *("--caps", "single", "--world-size", "2,4", "--json", tmp_path / "j"),
    )
    assert done.returncode == 0, done.stderr
    assert "two.log + topology.yaml" in done.stdout
    rows = json.loads((tmp_path / "j").read_text())["rows"]
    times = [[row["iteration_ns"] for row in rows if name in row["fabric"]] for name in ("topology.", "other.")]
    assert times[0] == times[1]
    assert len(times[0]) == 2


@pytest.mark.parametrize(
    ("several", "axes"),
    [
        ({}, ("bucket_cap_mb", "world_size")),
        ({"world_size": 3, "bucket_cap_mb": 2}, ("bucket_cap_mb", "world_size")),
        ({"trace": 2, "fabric": 3, "bucket_cap_mb": 5}, ("trace", "fabric")),
        ({"fabric": 3, "world_size": 2, "hook": 2}, ("world_size", "fabric")),
        ({"order": 3, "hook": 2}, ("hook", "order")),
    ],
)
def test_the_heat_map_shows_the_first_two_axes_with_several_values(several, axes):
    table = pd.DataFrame({axis: [min(row, several.get(axis, 1) - 1) for row in range(6)] for axis in AXES})
    assert heat_map_axes(table) == axes


def test_a_verdict_names_the_fabrics_that_suffice():
    rows = [("a", fabric, 64, "cap", "o", "h", 1, share) for fabric, share in (("x", 0.5), ("x", 0.95), ("y", 0.4))]
    table = pd.DataFrame(rows, columns=[*AXES, "iteration_ns", "efficiency"])
    assert verdicts(table) == ["verdict: a on 64 ranks has an efficiency of at least 90% on x (95%); less on y (40%)"]


def test_the_output_says_what_counts_as_free_what_ties_and_what_it_leaves_out(here, trace, topology, tmp_path):
    sizes = ",".join(map(str, range(2, 86, 2)))
    asked = ("--caps", "0.01,single", "--hooks", "none,fp16", "--world-size", sizes)
    done = here("predict", trace, "--fabric", topology, *asked, "--json", tmp_path / "j")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "the fabric has no processor costs, so copies, launches and slow-downs count as free" in lines
    assert [line for line in lines if line.startswith("the hook fp16 was not measured")]
    assert "2 more rows of the table not shown; at most 40 are printed" in lines
    assert "2 more verdicts not shown; at most 40 are printed" in lines
    assert "a tie with" in done.stdout
    rows = json.loads((tmp_path / "j").read_text())["rows"]
    assert {row["p99_ns"] for row in rows} == {None}
    assert {type(row["is_tie"]) for row in rows} == {bool}
