"""The table of bucket caps is what is predicted today, and the page about bucket sizes quotes it."""

import pytest

from validation import bucket_cap_study as study
from validation import confirmed_caps


@pytest.mark.parametrize("number", [0, 700, 1409])
def test_a_row_is_predicted_again(number):
    row = study.rows_of_table()[number]
    node, _, network = row["system"].partition(", ")
    rate = int(network.split()[0]) if network else None
    again = study.row_of(row["model"], node, rate, int(row["gpus"]))
    assert {name: str(study.rounded(value)) for name, value in again.items()} == row


def test_every_row_is_there_once():
    rows = study.rows_of_table()
    assert len({(row["model"], row["system"], row["gpus"]) for row in rows}) == len(rows)
    assert {row["model"] for row in rows} == set(study.MODELS)
    assert len({row["system"] for row in rows}) == len(study.systems())


def test_no_buckets_beat_the_bound_and_the_best_are_never_slower_than_a_cap():
    for row in study.rows_of_table():
        times = [float(row[name]) for name in row if name.startswith(("cap ", "rule x", "torch's"))]
        assert float(row["bound"]) <= float(row["best"]) <= min(times) * (1 + 1e-5)


def test_confirmed_cases_keep_their_sides_of_the_promise():
    rows = study.rows_of_table()
    for promising in (True, False):
        cases = confirmed_caps.chosen(rows, promising=promising)
        assert len(cases) == confirmed_caps.CASES
        assert all((confirmed_caps.promised(row) >= confirmed_caps.PROMISED) == promising for row in cases)
