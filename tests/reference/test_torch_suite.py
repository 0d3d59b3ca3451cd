"""Torch's own DDP tests, with our class in torch's place, come out as `torch_suite/expected.csv` says.

`make test-torch` runs the slow ones too, and `make versions` with other versions of torch.
"""

import pytest

from .torch_suite import run

EXPECTED = run.table()


@pytest.mark.parametrize(
    "test", [test for test, row in EXPECTED.items() if not (row.slow and run.has_version_of_table())]
)
def test_torchs_test_comes_out_as_the_table_says(test):
    outcome = run.run_one(test, "ours")
    if outcome.why == run.NO_SUCH_TEST and not run.has_version_of_table():
        pytest.skip(outcome.why)
    assert outcome.name == run.expectation(test, "ours", outcome), outcome.why


def test_whatever_passes_for_torchs_class_passes_for_ours():
    assert not [row.test for row in EXPECTED.values() if row.torch == "passed" != row.ours]


def test_every_outcome_but_passed_has_a_reason():
    assert all(row.reason for row in EXPECTED.values() if (row.torch, row.ours) != ("passed", "passed"))
