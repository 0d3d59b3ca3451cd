"""Torch's own DDP tests, with our class in torch's place, come out as `torch_suite/expected.csv` says.

`make test-torch` runs them with the pinned version of torch, and `make versions` with others.
"""

import pytest

from .torch_suite import run

EXPECTED = run.table()


@pytest.mark.skipif(run.has_version_of_table(), reason="make test-torch runs them")
@pytest.mark.parametrize("test", EXPECTED)
def test_torchs_test_comes_out_as_the_table_says(test):
    outcome = run.run_one(test, "ours")
    if outcome.why == run.NO_SUCH_TEST and not run.has_version_of_table():
        pytest.skip(outcome.why)
    assert outcome.name == run.expectation(test, "ours", outcome), outcome.why


def test_whatever_passes_for_torchs_class_passes_for_ours():
    assert not [row.test for row in EXPECTED.values() if row.torch == "passed" != row.ours]


def test_every_outcome_but_passed_has_a_reason():
    assert all(row.reason for row in EXPECTED.values() if (row.torch, row.ours) != ("passed", "passed"))
