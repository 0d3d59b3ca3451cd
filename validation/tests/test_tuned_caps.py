"""`validation.tuned_caps`: every published reducer is tuned, and compared with what was measured."""

import pytest

from validation.tuned_caps import tuned_caps

pytestmark = pytest.mark.timeout(300)  # the plans take a minute and a half of one core, more beside other jobs


@pytest.fixture(scope="module")
def rows():
    return tuned_caps()


def test_every_reducer_has_a_plan_and_a_regret_among_its_measured_caps(rows):
    assert {row.gpus for row in rows} == {2}
    for row in rows:
        assert row.fastest.reducer == row.nearest.reducer == row.reducer
        assert row.regret >= 0
        assert row.plan.lower_bound_ns <= row.plan.iteration_ns <= row.plan.best_cap_ns


def test_two_a100s_whose_caps_differ_by_less_than_the_errors_keep_the_default(rows):
    (row,) = (row for row in rows if row.reducer == "GPT-2 124M")
    assert row.plan.keep_default
