"""The forecasts for clusters have intervals, and their score counts rows that have a truth."""

import pytest

from validation.cluster_forecasts import FILE, KNOWN_STEPS, LOGS, NODES, SIZES, read, score


def test_every_cluster_has_a_forecast_with_an_interval():
    sealed = read()
    reduced = [one for one in sealed if one.model == "all-reduce"]
    assert len(reduced) == len(LOGS) * len(NODES) * len(SIZES)
    assert {(one.node, one.known_gpus) for one in sealed if one.known_gpus} == {
        (n, k) for n, _, _, k, _ in KNOWN_STEPS
    }
    assert all(0 < one.low_us < one.us < one.high_us for one in sealed)


def test_forecasts_are_scored_against_the_rows_that_have_a_truth(tmp_path):
    truths, sealed = tmp_path / "truths.csv", read()
    lines = [
        f"{one.model},{one.node},{one.gpus},{one.bytes},{one.us * factor}"
        for one, factor in zip(sealed, (1, 9), strict=False)
    ]
    truths.write_text("\n".join(["model,node,gpus,bytes,us", *lines]))
    assert score(sealed, truths)[:2] == (2, 0.5)
    truths.write_text("model,node,gpus,bytes,us\n")
    with pytest.raises(ValueError, match="expected a truth of at least one forecast"):
        score(sealed, truths)
    assert FILE.is_file()
