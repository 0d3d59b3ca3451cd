"""Torch's DDP is the oracle: the same script sees the same bits under our class."""

import pytest

from . import bodies, scenarios


@pytest.mark.parametrize("case", scenarios.CASES)
def test_a_script_sees_the_same_as_under_torchs_class(two_ranks, case):
    for ours, torchs in two_ranks.run(bodies.run_scenario, case):
        bodies.assert_same(ours, torchs)
