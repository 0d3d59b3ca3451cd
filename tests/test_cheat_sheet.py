"""Cheat sheet and limits of DDP: their commands print their numbers, and all terms have a place to read more."""

import re
from pathlib import Path

import pytest

from ddplab.demo import FABRIC, TRACE

ROOT = Path(__file__).parent.parent
SHEET = (ROOT / "docs" / "cheat_sheet.md").read_text()
RULES = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in SHEET.partition("| rule |")[2].splitlines()
    if "`--fabric" in line
]


ENDS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs" / "where_ddp_ends.md").read_text().splitlines()
    if line.endswith("` |")
]


def block(page: str, name: str) -> str:
    (found,) = re.findall(rf"^```yaml\n(# {name}\n.*?)^```$", (ROOT / page).read_text(), flags=re.M | re.S)
    return found


@pytest.mark.parametrize("rule", RULES, ids=[rule[0][:40] for rule in RULES])
def test_each_command_prints_the_times_of_its_rule(rule, here, monkeypatch, tmp_path):
    (tmp_path / "pod.yaml").write_text(block("docs/predict.md", "pod.yaml"))
    FABRIC.save(tmp_path / "out/demo/fabric.json")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    _, result, command = rule
    trace, equal = TRACE, ("--set", "device_spread=0")
    done = here("predict", trace, *equal, *command.strip("` ").split())
    assert done.returncode == 0, done.stderr
    usual = {"97.7", "176.9", "186.6"}  # the times without the setting, or on the other network
    printed = set(re.findall(r"\d+\.\d\b", done.stdout))
    named = set(re.findall(r"\b\d+\.\d\b", result))
    assert named
    assert named - usual <= printed


@pytest.mark.parametrize("row", ENDS, ids=[row[0] for row in ENDS])
def test_the_planner_gives_the_memory_and_the_rates_of_each_row(row, here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    _, memory, fits, rates, command = row
    done = here("plan", *command.strip("`").split(), "--world-size", "8,64,512")
    said = " ".join(done.stdout.split())
    assert f"{memory} of 84.6 GB" in said
    assert all(rate in said for rate in rates.split("; "))
    assert (f"does not fit with adam-fp32 ({memory}" in said) == (fits == "no")
    assert (f"unknown with sgd, momentum, adam, adam-fp32 ({memory}" in said) == (fits == "open")


def test_every_symptom_has_a_fix():
    rows = [line for line in SHEET.partition("## Rules of thumb")[0].splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows if "---" not in row]
    assert len(cells) > 25
    assert all(len(row) == 3 and row[0] and row[2] for row in cells)


def test_every_term_of_the_glossary_has_a_meaning_and_a_link():
    page = (ROOT / "docs" / "glossary.md").read_text()
    rows = [
        line for line in page.splitlines() if line.startswith("| ") and "---" not in line and "meaning" not in line
    ]
    terms = [row.split(" | ")[0] for row in rows]
    assert len(terms) == len(set(terms)) > 40
    for row in rows:
        _, meaning, link = row.strip("|").split(" | ")
        assert meaning.endswith("."), row
        assert "](" in link, row
