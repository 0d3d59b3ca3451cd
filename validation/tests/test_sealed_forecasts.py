"""The sealed forecasts are of every one-node result, and their score counts rows that have a truth."""

import csv

import pytest

from validation.sealed_forecasts import FILE, LINKS, NODES, RESULTS, ROUNDS, forecasts, read, score, write


def test_every_result_of_one_node_has_forecasts_with_an_interval():
    with RESULTS.open(newline="") as file:
        results = [row for row in csv.DictReader(file) if row["round"] in ROUNDS and row["nodes"] == "1"]
    asked = {
        (row["round"], row["org"], row["system"], nodes)
        for row in results
        for nodes in NODES
        if any(name in row["gpu"] for name in LINKS)
    }
    sealed = read()
    keys = [(one.round, one.org, one.system, one.nodes) for one in sealed]
    assert set(keys) == asked
    assert len(set(keys)) == len(keys)
    for one in sealed:
        assert one.low_ms < one.step_ms < one.high_ms
        assert one.one_node_ms * 0.95 < one.step_ms < one.one_node_ms * 1.5


def test_sealed_forecasts_are_not_written_again():
    with pytest.raises(FileExistsError):
        write(FILE, [])


def test_forecasts_are_scored_against_the_rows_that_have_a_truth(tmp_path):
    sealed = read()
    lines = ["round,org,system,nodes,step_ms,note"]
    for one, factor in zip(sealed[:4], (1.0, 1.0, 1.0, 3.0), strict=True):
        lines.append(f"{one.round},{one.org},{one.system},{one.nodes},{one.step_ms * factor},a test")
    (tmp_path / "truths.csv").write_text("\n".join(lines))
    outcome = score(sealed, tmp_path / "truths.csv")
    assert (outcome.rows, outcome.inside) == (4, 0.75)
    assert outcome.mean_error == pytest.approx((2 / 3) / 4)
    (tmp_path / "truths.csv").write_text("round,org\nv5.0,me\n")
    with pytest.raises(ValueError, match="expected columns"):
        score(sealed, tmp_path / "truths.csv")


@pytest.mark.slow
def test_a_new_forecast_has_the_rows_of_the_sealed_ones():
    assert [one[:8] for one in forecasts()] == [one[:8] for one in read()]
