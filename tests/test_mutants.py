"""The mutants: every patch applies, and two of them end to end. `make mutants` tries them all."""

import ast
import re
import subprocess
import sys
from difflib import ndiff

import pytest

from .mutants.catalogue import ROOT, catalogue
from .mutants.page import AREAS, FOUND_HERE, PAGE, page, recorded

MUTANTS = catalogue()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_patch_changes_a_few_lines_of_the_present_code_and_what_it_names_exists(mutant):
    before = (ROOT / mutant.file).read_text()
    after = mutant.apply(before)
    signs = [line[0] for line in ndiff(mutant.before.splitlines(), mutant.after.splitlines())]
    assert 1 <= max(signs.count("+"), signs.count("-")) <= 15
    assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))
    if mutant.needs not in ("", "--baseline"):
        path, _, name = mutant.needs.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text()
    assert (mutant.area in AREAS) == bool(mutant.source)
    for source in filter(None, mutant.source.split(", ")):
        assert source == FOUND_HERE or re.fullmatch(r"[\w-]+/[\w.-]+#\d+", source)


def test_names_and_faults_are_unique_and_enough_were_published():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 80
    assert len({(mutant.file, mutant.apply((ROOT / mutant.file).read_text())) for mutant in MUTANTS}) == len(MUTANTS)
    assert sum("#" in mutant.source for mutant in MUTANTS) >= 30


def test_the_page_of_bugs_is_that_of_the_recorded_run():
    """`python -m tests.mutants.run --only NAME` records a mutant and writes the page."""
    outcomes = recorded()
    assert PAGE.read_text() == page(MUTANTS, outcomes)
    assert [mutant.name for mutant in MUTANTS] == list(outcomes)
    assert not [name for name, outcome in outcomes.items() if not outcome.caught_by]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_kit_catches_what_two_ranks_do_not_show(tmp_path):
    """With two ranks, half of a sum is the average, so the plain test passes."""
    command = [sys.executable, "-m", "tests.mutants.run", "--only", "divides-by-two,no-wait"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert "kit: 2 of 2; plain test: 1 of 2; no survivors" in done.stdout
    assert done.returncode == 0
