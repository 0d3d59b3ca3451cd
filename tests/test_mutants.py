"""The mutants: every patch applies, and two of them end to end. `make mutants` tries them all."""

import ast
import re
import subprocess
import sys
from difflib import ndiff

import pytest

from .mutants.catalogue import ROOT, catalogue
from .mutants.page import AREAS, FOUND_HERE, PAGE, Outcome, page, recorded, summary

MUTANTS = catalogue()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_patch_changes_a_few_lines_of_the_present_code_and_parses(mutant):
    before = (ROOT / mutant.file).read_text()
    after = mutant.apply(before)
    signs = [line[0] for line in ndiff(mutant.before.splitlines(), mutant.after.splitlines())]
    assert 1 <= max(signs.count("+"), signs.count("-")) <= 15
    assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))


def test_names_and_faults_are_unique():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 80
    assert len({(mutant.file, mutant.apply((ROOT / mutant.file).read_text())) for mutant in MUTANTS}) == len(MUTANTS)


def test_each_mutant_says_which_mistake_it_is_in_one_sentence():
    for mutant in MUTANTS:
        assert mutant.mistake[0].isupper() or mutant.mistake.startswith("no_sync"), mutant.name
        assert mutant.mistake.endswith("."), mutant.name


def test_what_a_mutant_needs_exists():
    for mutant in MUTANTS:
        if mutant.needs not in ("", "--baseline"):
            path, _, name = mutant.needs.partition("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), mutant.name


def test_a_bug_says_where_it_was_published_and_what_it_spoils():
    for mutant in MUTANTS:
        assert (mutant.area in AREAS) == bool(mutant.source), mutant.name
        for source in filter(None, mutant.source.split(", ")):
            assert source == FOUND_HERE or re.fullmatch(r"[\w-]+/[\w.-]+#\d+", source), mutant.name
    assert sum("#" in mutant.source for mutant in MUTANTS) >= 30


def test_the_page_of_bugs_is_that_of_the_recorded_run():
    """`python -m tests.mutants.run --only NAME` records a mutant and writes the page."""
    outcomes = recorded()
    assert PAGE.read_text() == page(MUTANTS, outcomes)
    assert [mutant.name for mutant in MUTANTS] == list(outcomes)
    assert not [name for name, outcome in outcomes.items() if not outcome.caught_by]


def test_the_page_names_survivors_and_links_to_issues():
    bug = next(mutant for mutant in MUTANTS if mutant.source.endswith("#63210"))
    text = page([bug], {bug.name: Outcome("", "", plain=False)})
    assert "| [pytorch#63210](https://github.com/pytorch/pytorch/issues/63210) | **survives** |" in text
    assert f"### {bug.name}\n" in text
    assert "\n-launched = self.send(" in text


def test_the_summary_counts_what_each_test_caught():
    one, two = MUTANTS[:2]
    outcomes = {one.name: Outcome("one weight", "0.5", plain=True), two.name: Outcome("", "", plain=False)}
    assert summary([one, two], outcomes) == "kit: 1 of 2; plain test: 1 of 2"


def test_an_unknown_mutant_is_refused():
    command = [sys.executable, "-m", "tests.mutants.run", "--only", "no-such-mutant"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "there is no mutant 'no-such-mutant'" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_kit_catches_what_two_ranks_do_not_show(tmp_path):
    """With two ranks, half of a sum is the average, so the plain test passes."""
    command = [sys.executable, "-m", "tests.mutants.run", "--only", "divides-by-two,no-wait"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert "kit: 2 of 2; plain test: 1 of 2; no survivors" in done.stdout
    assert done.returncode == 0
