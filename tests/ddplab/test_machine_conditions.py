"""Conditions of the machine: the one that does not hold is named."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.validation import machine_conditions
from ddplab.validation.machine_conditions import Conditions, ConditionsError

GOOD = Conditions(0.9, (1, 2, 3), 0, 1000, 1.0, 1.0, 0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"idle": 0.1}, "at least 30% of the processor idle, got 10%"),
        ({"overslept_ns": (1, 2, 11)}, "within 1% of the shortest iteration"),
        ({"late_ns": 11}, "collectives of the modelled network to end within 1%"),
        ({"device_slow_down": 1.03}, "the device to be slowed down by at most 1.02, got 1.030"),
        ({"network_slow_down": 1.03}, "the network to be slowed down by at most 1.02, got 1.030"),
    ],
)
def test_a_condition_that_does_not_hold_is_named(change, named):
    GOOD.check()
    with pytest.raises(ConditionsError, match=named):
        replace(GOOD, **change).check()


@given(st.lists(st.floats(1.0, 1.05), min_size=3, max_size=3))
def test_a_burst_of_other_work_does_not_end_a_run(network):
    """Slow-downs are measured up to three times, until they are within the limit."""
    measured = iter(network)
    if min(network) > machine_conditions.SLOW_DOWN_AT_MOST:
        with pytest.raises(ConditionsError, match="the network to be slowed down"):
            machine_conditions.checked_slow_downs(lambda: (1.0, next(measured)))
    else:
        first = next(one for one in network if one <= machine_conditions.SLOW_DOWN_AT_MOST)
        assert machine_conditions.checked_slow_downs(lambda: (1.0, next(measured))) == (1.0, first)
