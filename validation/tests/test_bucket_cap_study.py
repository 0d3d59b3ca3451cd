"""The table of bucket caps is what is predicted today, and the page about bucket sizes quotes it."""

import re
from pathlib import Path

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


def test_no_buckets_beat_the_bound_and_the_best_are_never_slower_than_what_the_search_tried():
    for row in study.rows_of_table():
        caps = [float(row[name]) for name in row if name.startswith(("cap ", "rule, ", "rule x "))]
        tried = [float(row[name]) for name in ("rule x 1", "torch's default", "one bucket", "MG-WFBP")]
        assert float(row["bound"]) <= float(row["best"]) <= min(tried) * (1 + 1e-5)
        assert float(row["bound"]) <= min(caps) * (1 + 1e-5)


def test_confirmed_cases_keep_their_sides_of_the_promise():
    rows = study.rows_of_table()
    for promising in (True, False):
        cases = confirmed_caps.chosen(rows, promising=promising)
        assert len(cases) == confirmed_caps.CASES
        assert all((confirmed_caps.promised(row) >= confirmed_caps.PROMISED) == promising for row in cases)


PAGE = (Path(__file__).parents[2] / "docs" / "bucket_size.md").read_text()
COLUMNS = {"100 MB": "cap 100", "the rule, as one cap": "rule, one cap", "the rule": "rule x 1"}
MODELS = {"ResNet-50": "resnet50-224", "BERT-Large": "bert-large", "GPT-2 XL": "gpt2-xl"}


def test_the_page_has_the_losses_of_the_table():
    rows = study.rows_of_table()
    assert f"{len(rows):,} predicted trainings" in PAGE
    table = PAGE.partition("| buckets by |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) == 7
    for line in table:
        name, *shown = (cell.strip() for cell in line.strip("|").split("|"))
        name = name.removesuffix(" (CS336)").replace("torch inductor", "inductor")
        cells = study.summary(rows, [COLUMNS.get(name, name)]).splitlines()[-1].split("|")[2:5]
        assert shown == [f"{cell.strip()} %" for cell in cells], name


def test_the_page_has_examples_of_the_table():
    table = PAGE.partition("| training |")[2].partition("\n\n")[0].splitlines()[2:]
    by_name = {(row["model"], row["system"], row["gpus"]): row for row in study.rows_of_table()}
    assert len(table) == 5
    for line in table:
        name, times, cap, *shown = (cell.strip() for cell in line.strip("|").split("|"))
        model, gpus, system = re.fullmatch(r"(.*?), ([\d,]+) GPUs, (.*)", name).groups()
        row = by_name[MODELS[model], system, gpus.replace(",", "")]
        expected = [float(row[column]) for column in ("computation", "all-reduce of all", "all-reduce of 1 MiB")]
        assert [float(time) for time in times.split(", ")] == pytest.approx(expected, rel=0.01)
        assert cap.removesuffix(", doubling") == row["rule MiB"]
        assert cap.endswith("doubling") == (row["rule doubles"] == "1")
        assert shown == [f"{float(row[column]):.1f}" for column in ("torch's default", "rule x 1", "best")]
