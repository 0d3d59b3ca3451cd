"""The mutants: every patch applies, and two of them end to end. `make mutants` tries them all."""

import ast
import subprocess
import sys
from difflib import SequenceMatcher

import pytest

from .mutants.catalogue import ROOT, catalogue
from .mutants.run import Outcome, summary, table

MUTANTS = catalogue()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_patch_changes_one_line_of_the_present_code_and_parses(mutant):
    before = (ROOT / mutant.file).read_text()
    after = mutant.apply(before)
    (edit,) = [
        one
        for one in SequenceMatcher(None, before.splitlines(), after.splitlines()).get_opcodes()
        if one[0] != "equal"
    ]
    _, start, end, new_start, new_end = edit
    assert end - start == 1
    assert new_end - new_start <= 1
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
            assert f"def {name}(" in (ROOT / path).read_text(), mutant.name


def test_the_table_names_survivors_and_counts_what_each_test_caught():
    one, two = MUTANTS[:2]
    outcomes = [Outcome(one.name, "", "one weight", "0.5", True, 1.0), Outcome(two.name, "", "", "", False, 1.0)]
    assert summary(outcomes) == "kit: 1 of 2; plain test: 1 of 2"
    assert table([one, two], outcomes).splitlines()[-1] == f"| {two.name} | {two.mistake} | **survives** | no |"


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
